"""A checkpoint of Megatron-Core (torch_dist) is imported as the state that ckpt.adapters.megatron saves."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.adapters.megatron_values import decoded
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_megatron import read_state

RUN = [sys.executable, "-m", "ckpt.tools.import_step"]


class Evil:
    """An object whose pickle writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.write_text, (self.file, "executed")


def megatron_folder(folder: Path, tensors: dict[str, Any], common: Any) -> Path:
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save(common, folder / "common.pt")
    return folder


def imported(source: Path, *options: str) -> str:
    """Import it, and return what the command printed to stderr."""
    url = source.with_name("repository")
    done = subprocess.run([*RUN, str(source), str(url), *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_values_and_tensors_are_imported_and_nothing_is_executed(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    arguments = argparse.Namespace(
        layers=4, dtype=torch.bfloat16, model=Evil(proof), names=["a"], nested={"evil": Evil(proof), "n": 1}
    )
    common = {
        "args": arguments, "iteration": 7, "random": np.arange(3), "moment": torch.ones(2), "evil": Evil(proof), 5: (1, None),
    }  # fmt: skip
    weights = {"layers.weight": torch.randn(4, 3), "rng_state/shard_0_1": [3, "cpu"]}
    printed = imported(megatron_folder(tmp_path / "iter_0000007", weights, common), "--step=7")
    assert not proof.exists()
    names = "common.evil, common.args.model, common.args.nested.evil"
    assert f"these are not plain values, and are not imported: {names}" in printed
    loaded = ckpt.load(tmp_path / "repository")
    assert torch.equal(loaded["tensors"]["layers.weight"], weights["layers.weight"])
    assert loaded["objects"] == {"rng_state/shard_0_1": [3, "cpu"]}
    values = decoded(loaded["common"])
    assert vars(values["args"]) == {"layers": 4, "dtype": torch.bfloat16, "names": ["a"], "nested": {"n": 1}}
    assert (values["iteration"], values["random"].tolist(), values["moment"].tolist(), values[5]) == (
        7,
        [0, 1, 2],
        [1, 1],
        (1, None),
    )


def test_a_part_is_imported(tmp_path: Path) -> None:
    source = megatron_folder(tmp_path / "source", {"a": torch.ones(2), "b": torch.zeros(2)}, {"iteration": 1})
    imported(source, "--only=tensors.a")
    assert ckpt.load(tmp_path / "repository").keys() == {"tensors"}
    assert ckpt.load(tmp_path / "repository")["tensors"]["a"].tolist() == [1, 1]


def test_code_of_torchscript_in_the_common_file_is_refused_and_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = megatron_folder(tmp_path / "source", {"a": torch.ones(2)}, {"iteration": 1})
    torch.jit.script(torch.nn.Linear(1, 1)).save(source / "common.pt")
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("the code was loaded"))
    with pytest.raises(CkptError, match="is an archive of TorchScript, which has code: leave it out with --only"):
        read_state(source)
    assert set(read_state(source, lambda name: name != "common")) == {"tensors", "objects"}


def test_a_common_file_that_sets_an_attribute_of_a_class_does_not_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argparse.Namespace, "forged", "no", raising=False)
    source = megatron_folder(tmp_path / "source", {"a": torch.ones(2)}, {"iteration": 1})
    with zipfile.ZipFile(source / "common.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(source / "common.pt", "w") as archive:
        for name, data in records.items():
            forged = b"cargparse\nNamespace\n(N}Vforged\nVyes\nstb0" * name.endswith("data.pkl")
            archive.writestr(name, forged + data)
    assert read_state(source)["common"] == {"iteration": 1}
    assert argparse.Namespace.forged == "no"  # type: ignore[attr-defined]


def test_a_damaged_common_file_is_refused(tmp_path: Path) -> None:
    source = megatron_folder(tmp_path / "source", {"a": torch.ones(2)}, {"iteration": 1})
    (source / "common.pt").write_bytes(b"PK\x03\x04 no archive")
    done = subprocess.run([*RUN, str(source), str(tmp_path / "repository")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "common.pt can't be read" in done.stderr
    assert "--only" in done.stderr
