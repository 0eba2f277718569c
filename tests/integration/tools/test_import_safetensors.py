"""ckpt-import: safetensors files, and folders with an index, become steps with the same bytes; damaged ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.imports import assert_same_tensors, load_imported
from safetensors.torch import save_file

import ckpt
from ckpt.storage.base.errors import CkptError
from ckpt.tools.restore import command as restore


def test_safetensors_of_a_step_come_back(tmp_path: Path) -> None:
    """`ckpt-restore` writes a file, a folder with shards, and ties; `ckpt-import` reads them."""
    embed = torch.randn(300, 4).bfloat16()
    state = {
        "embed": embed,
        "norm.weight": torch.ones(3),
        "head": embed,
        "empty": torch.zeros(0, 2),
        "scalar": torch.tensor(1.5),
    }
    ckpt.save(state, tmp_path / "run", step=1)
    assert restore.main([str(tmp_path / "run"), str(tmp_path / "out.safetensors")], standalone_mode=False) == 0
    loaded = load_imported(tmp_path / "out.safetensors")
    assert loaded["head"] is loaded["embed"]
    assert_same_tensors(dict(sorted(loaded.items())), dict(sorted(state.items())))
    arguments = [str(tmp_path / "run"), str(tmp_path / "hf"), "--hf", "--max-shard-size", "1KB"]
    assert restore.main(arguments, standalone_mode=False) == 0
    del state["head"]
    assert_same_tensors(
        dict(sorted(load_imported(tmp_path / "hf", "--under", "model")["model"].items())), dict(sorted(state.items()))
    )


def test_types_that_safetensors_lacks_come_back(tmp_path: Path) -> None:
    state = {
        "complex": torch.randn(2, 3, dtype=torch.complex128), "scalar": torch.tensor(2 + 1j, dtype=torch.complex128),
        "half": torch.zeros(2, dtype=torch.complex32), "four": np.arange(4).astype(ml_dtypes.int4),
        "float8": np.arange(3).astype(ml_dtypes.float8_e3m4), "date": np.array(["2024-01-02"], "M8[D]"),
        "plain": torch.arange(3, dtype=torch.uint8), "record": np.zeros((2, 0), "i4,f8"),
    }  # fmt: skip
    ckpt.save(state, tmp_path / "run", step=1)
    assert restore.main([str(tmp_path / "run"), str(tmp_path / "out.safetensors")], standalone_mode=False) == 0
    loaded = load_imported(tmp_path / "out.safetensors")
    assert {name: (type(value), value.dtype) for name, value in loaded.items()} == {
        name: (type(value), value.dtype) for name, value in state.items()
    }
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert_same_tensors(loaded[name], value)
        else:
            assert (loaded[name].tobytes(), loaded[name].shape) == (value.tobytes(), value.shape)


@pytest.mark.parametrize(
    "metadata",
    [
        {"tied": '{"b": "a"}'}, {"tied": '{"c": ["a"], "d": "no"}'}, {"tied": "[]"}, {"tied": "x"}, {"dtypes": '["a"]'},
        {"dtypes": '{"a": "complex128", "b": "float8_e3m4"}'}, {"dtypes": '{"a": "object", "b": ["x"]}'},
        {"dtypes": '{"a": "int64", "b": "no type"}'}, {"dtypes": '{"a": "S0"}'},
    ],
)  # fmt: skip
def test_metadata_of_another_program_changes_no_array(metadata: dict[str, str], tmp_path: Path) -> None:
    state = {"a": torch.arange(6, dtype=torch.uint8).reshape(2, 3), "b": torch.arange(3)}
    save_file(state, tmp_path / "model.safetensors", metadata)
    assert_same_tensors(dict(sorted(load_imported(tmp_path / "model.safetensors").items())), state)


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(50), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def write(name: str, changes: dict[str, Any]) -> None:
        text = json.dumps({**header, "a": {**header["a"], **changes}}).encode()
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    (tmp_path / "short.safetensors").write_bytes(data[:-20])
    (tmp_path / "no-header.safetensors").write_bytes(data[:20])
    (tmp_path / "no-json.safetensors").write_bytes(data[:8] + b"x" * length)
    (tmp_path / "nothing.safetensors").write_bytes(b"")
    write("shape.safetensors", {"shape": [51]})
    write("type.safetensors", {"dtype": "F6_E2M3"})
    write("offsets.safetensors", {"data_offsets": [-8, 192]})
    for path in sorted(tmp_path.glob("*-*.safetensors")) + [
        tmp_path / f"{n}.safetensors" for n in ("short", "nothing", "shape")
    ]:
        with pytest.raises(CkptError, match=r"again|fit"):
            load_imported(path)
    with pytest.raises(CkptError, match="F6_E2M3"):
        load_imported(tmp_path / "type.safetensors")
    with pytest.raises(CkptError, match="fit"):
        load_imported(tmp_path / "offsets.safetensors")
    with pytest.raises(CkptError, match="several files"):
        load_imported(_copies(tmp_path, data))
    assert not (tmp_path / "imported").exists()


def _copies(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / f"{name}.safetensors").write_bytes(data)
    return tmp_path / "two"


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": "one.safetensors", "b": "two.safetensors"}, "two.safetensors, which is missing"),
        ({"a": "../one.safetensors"}, "not in its folder"),
        ({"a": "one.safetensors", "z": "one.safetensors"}, "names z, which its files lack"),
        ({"y": "one.safetensors", "z": "one.safetensors"}, "names y and 1 more, which its files lack"),
        ([1], "is not an index"),
    ],
)
def test_wrong_indexes_are_refused(weights: Any, words: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(5)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(CkptError, match=words):
        load_imported(tmp_path / "model.safetensors.index.json")


def test_shards_of_torch_save_with_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": torch.arange(5)}, folder / "pytorch_model-1.bin")
    torch.save({"b": torch.ones(2)}, folder / "pytorch_model-2.bin")
    index = {"weight_map": {"b": "pytorch_model-2.bin", "a": "pytorch_model-1.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same_tensors(load_imported(folder), {"b": torch.ones(2), "a": torch.arange(5)})
