"""ckpt-restore --strip and --rename: the names in the files of every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from helpers.restored_files import ENDINGS, OPENERS, left_in

import ckpt
from ckpt.storage.base.errors import CkptError
from ckpt.tools.restore import command


def export(*arguments: object) -> None:
    assert command.main([*map(str, arguments)], standalone_mode=False) == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository with a model with tied weights, an optimizer and plain values."""
    embed = torch.arange(6.0).reshape(3, 2)
    model = {"body": {"embed": embed, "norm": torch.ones(2)}, "head": embed, "kind": "small"}
    ckpt.save({"model": model, "moments": np.zeros(3), "step": 3}, tmp_path / "run", step=3)
    return tmp_path / "run"


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_prefix_is_stripped_and_names_are_replaced(ending: str, root: Path, tmp_path: Path) -> None:
    dest = tmp_path / f"out.{ending}"
    export(root, dest, "--strip", "model.", "--rename", r"^body\.(\w+)$=\1.weight", "--rename", "^head=lm_head.weight")
    if ending == "pt":
        loaded = torch.load(dest, weights_only=True)
        assert list(loaded) == ["embed.weight", "norm.weight", "lm_head.weight", "kind"]
        assert loaded["kind"] == "small"
        assert loaded["lm_head.weight"] is loaded["embed.weight"]
        assert torch.equal(loaded["embed.weight"], torch.arange(6.0).reshape(3, 2))
        return
    if ending in ("h5", "zarr"):
        import h5py
        import zarr

        file = h5py.File(dest) if ending == "h5" else zarr.open_group(dest, mode="r")
        names = set(file) if ending == "h5" else set(file.array_keys()) | set(file.attrs["tied"])
        assert names == {"embed.weight", "norm.weight", "lm_head.weight"}
        assert np.array_equal(file["embed.weight"][...], np.arange(6.0).reshape(3, 2))
        return
    names, read, values, tied = OPENERS[ending](dest)
    assert names == {"embed.weight", "norm.weight"}
    assert np.array_equal(np.asarray(read("embed.weight")[0]), np.arange(6.0).reshape(3, 2))
    assert values == {"kind": "small"}
    assert tied == {"lm_head.weight": "embed.weight"}


@pytest.mark.parametrize("state", [
    {"a.b": np.ones(3), "a": {"b": 5}}, {"a": {"b": 5}, "a.b": np.ones(3), "a.b~": 6},
])  # fmt: skip
def test_an_array_and_a_value_of_one_name_are_both_restored(state: dict[str, Any], tmp_path: Path) -> None:
    ckpt.save(state, tmp_path / "run", step=3)
    export(tmp_path / "run", tmp_path / "out.pt", "--rename", "unused=other")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(v for v in loaded.values() if isinstance(v, int)) == [5, 6][: len(state) - 1]
    assert [v.tolist() for v in loaded.values() if isinstance(v, torch.Tensor)] == [[1, 1, 1]]


def test_patterns_of_only_are_saved_names(root: Path, tmp_path: Path) -> None:
    export(root, tmp_path / "out.npz", "--strip", "model.", "--only", "model.head")
    assert [n for n in np.load(tmp_path / "out.npz").files if not n.startswith("__")] == ["head"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rename", r".*=x"], "one name, x"),
        (["--rename", r"model\.head=model.body.norm"], "model.body.norm and model.head one name"),
        (["--strip", "moments"], "nothing of the name moments"),
        (["--strip", "modle."], "no chosen leaf of .* begins with .modle"),
        (["--strip", "model.", "--only", "moments"], "no chosen leaf"),
    ],
)
def test_names_that_make_no_sense_are_refused(arguments: list[str], words: str, root: Path, tmp_path: Path) -> None:
    for ending in ("npz", "pt"):
        with pytest.raises(CkptError, match=words) as error:
            export(root, tmp_path / f"out.{ending}", *arguments)
        assert "\n" not in str(error.value)
        assert left_in(tmp_path) == []


@pytest.mark.parametrize("value", ["model", "=x", "(=x", r"model=\1", r"model=\g<a>"])
def test_patterns_that_are_no_patterns_are_refused(value: str, root: Path, tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="does not have the form|is not a regular expression"):
        export(root, tmp_path / "out.npz", "--rename", value)
