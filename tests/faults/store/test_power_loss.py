"""After a power loss at any moment, what was acknowledged is whole, and the repository or namespace can be written on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.campaigns import CountCases
from helpers.crash_states import CrashState
from helpers.mounts import why_no_fuse
from helpers.nodes import directories
from helpers.power_loss import AMOUNT, first_wrong, record

import ckpt
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.repository.repository import open_repository
from ckpt.storage.base.errors import NotFound

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")

SAVES = """
import sys
import numpy as np
import ckpt
from helpers.crash_states import leave_out
from helpers.power_loss import acknowledge
from ckpt.storage.base import fsync
from ckpt.storage.local import directory, durable_writer

mount, left_out = sys.argv[1:]
leave_out(left_out, directory, durable_writer, fsync)
for step in range(1, 6):
    state = {"weights": np.full(5000, step, np.int32), "step": step}
    ckpt.save(state, f"{mount}/run", step, keep=2, overwrite=True)
    acknowledge(mount, step)
ckpt.save({"weights": np.full(5000, 50, np.int32), "step": 5}, f"{mount}/run", 5, keep=2, overwrite=True)
acknowledge(mount, "replaced")
"""


NAMESPACE = """
import os, sys
from pathlib import Path
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.base import fsync
from ckpt.storage.local import durable_writer
from ckpt.storage.member import device
from helpers.crash_states import leave_out
from helpers.nodes import directories
from helpers.power_loss import acknowledge

mount, left_out = sys.argv[1:]
leave_out(left_out, device, durable_writer, fsync)
namespace = Namespace(directories(Path(mount), 3))
for number, (file, nbytes) in enumerate(eval(os.environ["CHANGES"])):
    if nbytes is None:
        namespace.delete([file])
    else:
        namespace.put(file, bytes([number]) * nbytes)
    acknowledge(mount, number)
namespace.close()
"""

CHANGES: list[tuple[str, int | None]] = [
    ("a", 10), ("b", 50_000), ("a", 20), ("b", 60_000), ("c", 40_000), ("a", None), ("b", None), ("a", 33_000), ("b", 5)
]  # fmt: skip
"""File and number of bytes, None for a deletion. Files of more than 32 KiB are stored as objects."""


def files_after(count: int) -> dict[str, bytes]:
    """Return the files after so many changes."""
    files: dict[str, bytes] = {}
    for number, (file, nbytes) in enumerate(CHANGES[:count]):
        if nbytes is None:
            del files[file]
        else:
            files[file] = bytes([number]) * nbytes
    return files


def wrong_in_repository(state: CrashState, folder: Path) -> str | None:
    """Return what is wrong in a state of a repository, None if each acknowledged step is whole and the next save succeeds."""
    root = folder / "run"
    acknowledged = [int(name) for name in state.acknowledged if name.isdecimal()]
    kept = set(acknowledged[-2:])
    try:
        found = set(open_repository(root).steps())
    except ckpt.CkptError as error:  # nothing was saved yet, or not all of it is there
        if acknowledged:
            return f"step {acknowledged[-1]} was acknowledged: {error}"
        found = set()
    newest = max(acknowledged, default=0)
    if newest and newest not in found and newest + 1 not in found:
        return f"step {newest} was acknowledged, and there are only {sorted(found)}"
    for step in found:
        values = {step, 10 * step} if step == 5 else {step}
        try:
            loaded = ckpt.load(root, step=step)
        except ckpt.CkptError as error:
            if step in kept:
                return f"step {step} was acknowledged: {error}"
            return f"step {step} is listed and can't be loaded: {error}"
        if loaded["step"] != step or set(loaded["weights"]) - values or len(set(loaded["weights"])) != 1:
            return f"step {step} has other values"
        if "replaced" in state.acknowledged and step == 5 and loaded["weights"][0] != 50:
            return "step 5 has the values that were replaced"
    try:
        ckpt.save({"weights": np.zeros(10)}, root, 100)
    except ckpt.CkptError as error:
        return f"the next save fails: {error}"
    if not np.array_equal(ckpt.load(root)["weights"], np.zeros(10)):
        return "the next save is not the newest step"
    return None


def wrong_in_namespace(state: CrashState, folder: Path) -> str | None:
    """Return what is wrong in a state of a namespace, None if it has the acknowledged files, and takes another one."""
    count = len(state.acknowledged)
    allowed = (files_after(count), files_after(count + 1))
    if not count:
        return None  # the namespace may not exist yet
    namespace = Namespace(directories(folder, 3))
    try:
        for file in ("a", "b", "c"):
            try:
                found: bytes | None = namespace.get(file)
            except NotFound:
                found = None
            if all(found != files.get(file) for files in allowed):
                return f"{file} is {found and (found[0], len(found))}"
        namespace.put("a", b"new")
        if namespace.get("a") != b"new":
            return "a new file is not found"
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        namespace.close()
    return None


@pytest.mark.soak
def test_acknowledged_steps_survive_a_power_loss_at_any_moment(tmp_path: Path, count_cases: CountCases) -> None:
    assert first_wrong(record(tmp_path, SAVES), wrong_in_repository, *AMOUNT, count_cases=count_cases) is None


@pytest.mark.soak
def test_acknowledged_files_of_a_namespace_survive_a_power_loss_of_all_members(tmp_path: Path, count_cases: CountCases) -> None:
    assert (
        first_wrong(record(tmp_path, NAMESPACE, CHANGES=repr(CHANGES)), wrong_in_namespace, *AMOUNT, count_cases=count_cases)
        is None
    )


@pytest.mark.parametrize("left_out", ["sync_file", "sync_folder", "sync_nearest_folder", "make_durable_root"])
def test_a_missing_fsync_of_a_repository_is_found(tmp_path: Path, left_out: str) -> None:
    """Else the tests above could not fail."""
    assert first_wrong(record(tmp_path, SAVES, left_out), wrong_in_repository, 1) is not None


@pytest.mark.parametrize("left_out", ["sync_file", "sync_nearest_folder"])
def test_a_missing_fsync_of_a_namespace_is_found(tmp_path: Path, left_out: str) -> None:
    assert first_wrong(record(tmp_path, NAMESPACE, left_out, CHANGES=repr(CHANGES)), wrong_in_namespace, 1) is not None
