"""The files of a repository on disk, and checks that all of its steps load."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckpt
from ckpt.format import json_records
from helpers.states import assert_same, state_of


def files(root: str | os.PathLike[str]) -> set[str]:
    """Return every file below a folder, including hidden and temporary ones."""
    return {os.path.relpath(os.path.join(base, name), root) for base, _, names in os.walk(root) for name in names}


def snapshot(root: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return every file below a folder with its bytes."""
    return {name: Path(root, name).read_bytes() for name in files(root)}


def reachable(root: str | os.PathLike[str]) -> set[str]:
    """Return the commit records below steps/, and the files that they name."""
    found = set()
    for path in Path(root).glob("steps/*/commit.json"):
        commit = json_records.decode_commit(path.read_bytes(), str(path))
        found.add(os.path.relpath(path, root))
        found.update(f.name for f in (*commit.manifests, *commit.trees, *commit.packs))
    return found


def assert_clean(root: str | os.PathLike[str], folders: bool = True) -> None:
    """Check that a repository has exactly the files that its commit records need, and no temporary file.

    folders: also check that no empty folder is left; a failed save may leave some until the repository is next opened to write.
    """
    present = files(root)
    steps = {name for name in present if name.startswith("steps/")}
    assert steps == reachable(root)
    assert not [name for name in present if os.path.basename(name).startswith(".")], "temporary files are left"
    empty = [base for base, below, names in os.walk(root) if not below and not names]
    assert not (folders and empty), f"empty folders are left: {empty}"
    rest = present - steps
    assert {name.partition("/")[0] for name in rest} <= {"ckpt.json", "generations", "lines"}


def assert_all_load(
    root: str | os.PathLike[str], acknowledged: int | None = None, saved_state: Callable[[int], Any] = state_of
) -> list[int]:
    """Check that every listed step loads bit for bit, and the newest is at least the acknowledged one. Return the steps.

    saved_state: returns what was saved as a step.
    """
    try:
        steps = ckpt.open(root).steps()
    except ckpt.StepNotFound:
        assert acknowledged is None
        return []  # the process died before it created the repository
    assert acknowledged is None or (steps and steps[-1] >= acknowledged), (steps, acknowledged)
    for step in steps:
        assert_same(ckpt.load(root, step=step), saved_state(step))
        assert ckpt.open(root)[step].verify() > 0
    if steps:
        assert_same(ckpt.load(root, strict=True), saved_state(steps[-1]))
    return steps
