"""A committed step whose tree names an array that no manifest has: it counts as damaged wherever a step is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import ckpt
from ckpt.format import json_records
from ckpt.format.digest import digest
from ckpt.tools import inspect


def state_of(step: int) -> dict[str, object]:
    """Return a state whose arrays show the step."""
    return {"step": step, "weight": np.full(100, step, np.float32)}


def rename_array_in_tree(root: Path, step: int) -> None:
    """Make the tree of a step name an array of no manifest, as steps of older versions may have it."""
    path = root / f"steps/{step}/commit.json"
    commit = json_records.decode_commit(path.read_bytes(), str(path))
    tree = json.loads((root / commit.trees[0].name).read_bytes())
    data = json.dumps(tree).replace('"array": "weight"', '"array": "absent"').encode()
    (root / commit.trees[0].name).write_bytes(data)
    file = json_records.StepFile(commit.trees[0].name, len(data), digest("xxh3-128", data).hex())
    path.write_bytes(json_records.encode_commit(replace(commit, trees=(file,))))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository whose step 1 is whole and whose step 2 is not complete."""
    for step in (1, 2):
        ckpt.save(state_of(step), tmp_path, step)
    rename_array_in_tree(tmp_path, 2)
    return tmp_path


def test_load_and_restore_use_the_older_whole_step(root: Path) -> None:
    with pytest.warns(UserWarning, match="is in the tree of step 2 of .* but in none of its manifests"):
        assert ckpt.load(root)["step"] == 1
    with ckpt.Checkpointer(root, every=None) as ck:
        with pytest.warns(UserWarning, match="older step 1"):
            state, start = ck.restore(state_of(0))
        assert (state["step"], start) == (1, 2)
    with pytest.raises(ckpt.IntegrityError, match="in none of its manifests"):
        ckpt.load(root, strict=True)
    with pytest.raises(ckpt.IntegrityError, match="in none of its manifests"):
        ckpt.load(root, step=2)
    latest = ckpt.open(root).latest()
    assert latest is not None
    assert latest.step == 1


@pytest.mark.parametrize("keep", [1, 2])
def test_retention_does_not_count_an_incomplete_step(root: Path, keep: int) -> None:
    """The job never loads, so that only the files show the damage."""
    ckpt.save(state_of(3), root, 3, keep=keep)
    assert ckpt.open(root).steps() == ([3] if keep == 1 else [1, 2, 3])
    assert ckpt.load(root, strict=True)["step"] == 3


def test_a_verification_reports_an_incomplete_step(root: Path) -> None:
    done = CliRunner().invoke(inspect.command, [str(root), "--verify", "--json"], standalone_mode=False)
    states = {step["step"]: step["state"] for step in json.loads(done.stdout)["steps"]}
    assert (done.return_value, states) == (1, {1: "ok", 2: "damaged"})
    with pytest.raises(ckpt.IntegrityError, match="in none of its manifests"):
        ckpt.open(root)[2].verify()


def test_a_save_replaces_an_incomplete_step_of_its_number(root: Path) -> None:
    ckpt.save(state_of(2), root, 2)
    assert ckpt.load(root, strict=True)["step"] == 2
