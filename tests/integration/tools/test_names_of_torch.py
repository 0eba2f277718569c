"""A name of torch in a file is looked up among what torch has: torch imports some of its modules when they are asked for."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.imports import load_imported

import ckpt
from ckpt.adapters.megatron_values import decoded
from ckpt.storage.base.errors import CkptError


@pytest.fixture
def names_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names for which torch runs code, as it does for `torch.onnx`."""
    found: list[str] = []
    original: Any = torch.__getattr__

    def record(name: str) -> Any:
        found.append(name)
        return original(name)

    monkeypatch.setattr(torch, "__getattr__", record)
    return found


NAMES = ["onnx", "_lazy_one", "aStorage"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_megatron", [False, True])
def test_metadata_of_dcp(name: str, is_megatron: bool, tmp_path: Path, names_asked: list[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / ".metadata").write_bytes(f"ctorch\n{name}\n.".encode())
    if is_megatron:
        (source / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    with pytest.raises(CkptError, match="can.t be read" if is_megatron else "none of DCP's metadata"):
        load_imported(source)
    assert name not in names_asked


def _megatron_folder(folder: Path, placed: str) -> Path:
    """Write a folder whose common.pt has the global `torch.placed`, which no program can pickle."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"kept": 1, "dtype": torch.float16, "other": json.JSONDecoder}, folder / "plain.pt")
    with zipfile.ZipFile(folder / "plain.pt") as plain, zipfile.ZipFile(folder / "common.pt", "w") as target:
        for record in plain.namelist():
            data = plain.read(record)
            if record.endswith("data.pkl"):
                assert b"cjson.decoder\nJSONDecoder\n" in data
                data = data.replace(b"cjson.decoder\nJSONDecoder\n", f"ctorch\n{placed}\n".encode())
            target.writestr(record, data)
    (folder / "plain.pt").unlink()
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_common_file_of_megatron(name: str, tmp_path: Path, names_asked: list[str]) -> None:
    found = decoded(load_imported(_megatron_folder(tmp_path / "source", name))["common"])
    assert name not in names_asked
    assert found == {"kept": 1, "dtype": torch.float16}


@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_among_values_of_megatron(name: str, tmp_path: Path, names_asked: list[str]) -> None:
    ckpt.save({"common": {"dtype": {"torch.dtype": name}}}, tmp_path)
    with pytest.raises(ckpt.FormatError, match=f"has no dtype '{name}'"):
        decoded(ckpt.load(tmp_path)["common"])
    assert name not in names_asked


@pytest.mark.parametrize("name", NAMES)
def test_an_element_type_of_a_forged_manifest(name: str, names_asked: list[str]) -> None:
    from ckpt.state.leaves import empty_leaf

    with pytest.raises(TypeError, match=f"has no dtype {name}"):
        empty_leaf("torch", name, (2,), {})
    assert name not in names_asked
