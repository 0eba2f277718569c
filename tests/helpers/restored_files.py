"""A saved step, and the files of each format that ckpt-restore writes of it, opened by their own libraries."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import ckpt
from ckpt.state.boxes import whole_box
from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.tree import flatten

ENDINGS = ("safetensors", "npz", "pt", "h5", "zarr")
Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Settings:
    rate: float
    scale: Any


def make_state() -> dict[str, Any]:
    """Return a state with arrays, tensors and values of many kinds."""
    random = np.random.default_rng(0)
    embed = torch.randn(40, 8).bfloat16()
    return {
        "model": {
            "embed.weight": embed,
            "head.weight": embed,
            "norm": torch.nn.Parameter(torch.randn(8)),
            "fp8": torch.randn(16).to(torch.float8_e4m3fn),
            "e5m2": torch.randn(16).to(torch.float8_e5m2),
            "unsigned": torch.arange(3).to(torch.uint32),
            "complex": torch.randn(3, dtype=torch.complex64),
            "transposed": torch.randn(3, 4).T,
        },
        "numpy": {
            "big": random.standard_normal(5).astype(">f4"),
            "zero_d": np.array(3.5),
            "empty": np.zeros((0, 3), np.int16),
            "minus_zero": np.full(4, -0.0),
            "int4": np.array([-1, 3, -8], ml_dtypes.int4),
            "bf16": random.standard_normal((2, 3)).astype(ml_dtypes.bfloat16),
            "dates": np.array(["2020-01-01", "NaT"], "M8[s]"),
            "text": np.array(["ab", "cdé"]),
            "bytes": np.array([b"a\0b", b""], "S3"),
            "records": np.array([(1, 2.5), (7, -1)], np.dtype([("a", "u1"), ("b", "<f8")], align=True)),
            "complex": np.ones((2, 2), complex) * 1j,
            "long": np.array([1.5], np.longdouble),
            "bool": np.array([True, False]),
            "scalar": np.float32(2.5),
        },
        "point": Point(np.ones(2), 3),
        "settings": Settings(0.1, torch.zeros(2)),
        "blob": bytes(range(256)) * 300,
        "epoch": 3,
        "nested": [{"name": "run", "none": None}, (1, 2.5), {}],
        "odd": {"inf": float("inf"), "big": 1 << 80, "raw": b"xy", "set": frozenset({1, 2})},
        "ordered": collections.OrderedDict(a=1),
        "counts": collections.defaultdict(int, a=2),
    }


VALUES = {
    "point.y": 3, "settings.rate": 0.1, "epoch": 3, "nested.0.name": "run", "nested.0.none": None, "nested.1.0": 1,
    "nested.1.1": 2.5, "nested.2": {}, "odd.inf": {"float": "7ff0000000000000"},
    "odd.big": {"int": str(1 << 80)}, "odd.raw": {"bytes": "eHk="}, "odd.set": {"frozenset": [1, 2]}, "ordered.a": 1,
    "counts.a": 2,
}  # fmt: skip
TIED = {"model.head.weight": "model.embed.weight"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a repository with step 3 and an older step of other content, and the state of step 3."""
    root = tmp_path_factory.mktemp("repository") / "run"
    state = make_state()
    ckpt.save({"old": np.arange(3)}, root, step=1)
    ckpt.save(state, root, step=3)
    return root, state


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return the result of ckpt-restore with these arguments."""
    return subprocess.run(
        [sys.executable, "-m", "ckpt.tools.restore", *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, **environment}, timeout=600,
    )  # fmt: skip


def left_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, without the repository."""
    return sorted(p.name for p in folder.iterdir() if p.name != "run")


Read = Callable[[str], tuple[Any, str | None]]
"""A function from a name to its array or tensor, and the dtype that the file states for it."""


def open_safetensors(path: Path) -> tuple[set[str], Read, dict[str, Any], dict[str, str]]:
    from safetensors import safe_open

    file = safe_open(path, "pt")
    metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["step"] == "3"
    types, values, tied = (json.loads(metadata.get(k, "{}")) for k in ("dtypes", "values", "tied"))
    return set(file.keys()), lambda name: (file.get_tensor(name), types.get(name)), values, tied


def open_npz(path: Path) -> tuple[set[str], Read, dict[str, Any], dict[str, str]]:
    file = np.load(path)
    types, values, tied = (json.loads(file[k].item()) if k in file else {} for k in ("__dtypes__", "__values__", "__tied__"))
    names = {n for n in file.files if not n.startswith("__")}
    return names, lambda name: (file[name], types.get(name)), values, tied


def open_h5(path: Path) -> tuple[set[str], Read, dict[str, Any], dict[str, str]]:
    import h5py

    file = h5py.File(path)
    names = set(file)
    tied = {n: m for n in names for m in TIED.values() if n != m and file[n] == file[m]}
    assert int(file.attrs["step"]) == 3
    values = json.loads(file.attrs.get("values", "{}"))
    return names - set(tied), lambda name: (file[name][()], file[name].attrs.get("dtype")), values, tied


def open_zarr(path: Path) -> tuple[set[str], Read, dict[str, Any], dict[str, str]]:
    import zarr

    group = zarr.open_group(path, mode="r")
    assert group.metadata.zarr_format == 3

    def read(name: str) -> tuple[Any, str | None]:
        return np.asarray(group[name][...]), group[name].attrs.get("dtype")

    return set(group.array_keys()), read, group.attrs["values"], group.attrs["tied"]


OPENERS = {"safetensors": open_safetensors, "npz": open_npz, "h5": open_h5, "zarr": open_zarr}


def bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.asarray(value).tobytes()


def saved_bytes(leaf: ArrayLeaf) -> bytes:
    out = np.empty(leaf.nbytes, np.uint8)
    leaf.read(whole_box(leaf.shape), out)
    return out.tobytes()


def assert_same(name: str, leaf: ArrayLeaf, actual: Any, stated: str | None) -> None:
    """Check that the bits and the type are equal; if the file states another dtype, integers of the same bits are expected."""
    expected = saved_bytes(leaf)
    shape = tuple(actual.shape)
    if stated is not None:
        assert stated == leaf.dtype, name
        assert bytes_of(actual) == expected, name
        assert "uint" in str(actual.dtype), name
        assert shape in (leaf.shape, (*leaf.shape, leaf.itemsize)), name
        return
    assert shape == leaf.shape, name
    if isinstance(actual, torch.Tensor) and leaf.dtype in (str(actual.dtype).removeprefix("torch."),):
        assert bytes_of(actual) == expected, name
        return
    native = numpy_dtype(leaf.dtype).newbyteorder("=")  # a format may have only one byte order
    array = actual.detach().numpy() if isinstance(actual, torch.Tensor) else np.asarray(actual)
    assert array.dtype.newbyteorder("=") == native, name
    assert array.astype(numpy_dtype(leaf.dtype)).tobytes() == expected, name


def assert_whole(path: Path, ending: str, state: dict[str, Any]) -> None:
    """Check that a file has everything of the state."""
    if ending == "pt":
        assert_whole_torch(path, state)
        return
    leaves = flatten(state).leaves
    names, read, values, tied = OPENERS[ending](path)
    assert names == set(leaves)
    for name, leaf in leaves.items():
        assert_same(name, leaf, *read(name))
    assert values == VALUES
    assert tied == TIED


def assert_whole_torch(path: Path, state: dict[str, Any]) -> None:
    loaded = torch.load(path, weights_only=True)
    for name, leaf in flatten({k: state[k] for k in ("model", "numpy")}).leaves.items():
        group, _, key = name.partition(".")
        value = loaded[group][key]
        raw = isinstance(value, dict)
        assert_same(name, leaf, *((value["raw"], value["dtype"]) if raw else (value, None)))
        assert raw == (key in ("int4", "dates", "text", "bytes", "records", "long")), name
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"]
    assert isinstance(loaded["model"]["norm"], torch.nn.Parameter)
    assert list(loaded) == list(state)
    assert torch.equal(loaded["point"][0], torch.ones(2, dtype=torch.float64))
    assert loaded["point"][1] == 3
    assert loaded["settings"]["rate"] == 0.1
    assert loaded["blob"] == state["blob"]
    assert loaded["nested"] == state["nested"]
    assert loaded["odd"] == {**state["odd"], "set": (1, 2)}
    assert isinstance(loaded["ordered"], collections.OrderedDict)
    assert loaded["counts"] == {"a": 2}
