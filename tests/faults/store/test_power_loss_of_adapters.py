"""After a power loss at any moment, the files by which frameworks find a saved step name the newest acknowledged one."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.crash_states import CrashState
from helpers.mounts import why_no_fuse
from helpers.power_loss import AMOUNT, first_wrong, record

import ckpt
from ckpt.adapters.megatron_tracker import TRACKERS

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")

ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
from ckpt.adapters.adapt import accelerate
from helpers.crash_states import leave_out
from helpers.power_loss import acknowledge

mount, left_out = sys.argv[1:]
leave_out(left_out, accelerate)
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 4))
folders = accelerate.SavedFolders(accelerator)
for number in range(3):
    folders.save_state(f"{mount}/out/step_{number}")
    acknowledge(mount, number)
"""

MARKERS = f"""
import os, sys
from ckpt.adapters import lightning_io, megatron_tracker
from helpers.crash_states import leave_out
from helpers.power_loss import acknowledge

mount, left_out = sys.argv[1:]
leave_out(left_out, lightning_io, megatron_tracker)
trackers = megatron_tracker.DelayedTrackers()
for number in range(20):
    lightning_io._write_file(f"{{mount}}/lightning/{{number % 3}}/last.ckpt", f"/repository/{{number}}")
    acknowledge(mount, f"lightning-{{number}}")
    with trackers.open(f"{{mount}}/{TRACKERS[1]}", "w") as file:
        file.write(str(number))
    trackers.finish(0)
    acknowledge(mount, f"megatron-{{number}}")
"""


def wrong_in_folders(state: CrashState, folder: Path) -> str | None:
    """Return what is wrong with the folders of accelerate, None if each one is whole and no acknowledged one is missing."""
    found = sorted(int(path.name.removeprefix("step_")) for path in (folder / "out").glob("step_*"))
    if missing := {int(number) for number in state.acknowledged} - set(found):
        return f"the folders of {missing} are missing"
    for number in found:
        try:
            ckpt.load(folder / "out" / f"step_{number}" / "ckpt")
        except ckpt.CkptError as error:
            return f"step_{number}: {error}"
    return None


def wrong_in_markers(state: CrashState, folder: Path) -> str | None:
    """Return which file names an older step than the acknowledged one, None if there is none."""
    from ckpt.adapters import lightning_io

    for name in dict.fromkeys(state.acknowledged):
        framework, _, number = name.partition("-")
        newer = [int(number) + i for i in (0, 3 if framework == "lightning" else 1)]
        if f"{framework}-{newer[1]}" in state.acknowledged:
            continue
        if framework == "lightning":
            path = folder / "lightning" / str(newer[0] % 3) / "last.ckpt"
            if not path.exists() or lightning_io._read_file(path) not in [f"/repository/{each}" for each in newer]:
                return f"{path} does not name step {number}"
        elif not (tracker := folder / TRACKERS[1]).exists() or tracker.read_text() not in map(str, newer):
            return f"{TRACKERS[1]} does not name step {number}"
    return None


@pytest.mark.soak
@pytest.mark.parametrize(("program", "wrong_in"), [(ACCELERATE, wrong_in_folders), (MARKERS, wrong_in_markers)])
def test_acknowledged_steps_are_found_after_a_power_loss_at_any_moment(tmp_path: Path, program: str, wrong_in: object) -> None:
    assert first_wrong(record(tmp_path, program), wrong_in, *AMOUNT) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("program", "wrong_in"), [(ACCELERATE, wrong_in_folders), (MARKERS, wrong_in_markers)])
def test_a_missing_fsync_of_the_folder_is_found(tmp_path: Path, program: str, wrong_in: object) -> None:
    """Else the test above could not fail."""
    assert first_wrong(record(tmp_path, program, "sync_folder"), wrong_in, 1) is not None  # type: ignore[arg-type]
