"""After a power loss at any moment, the files by which frameworks find a saved step name the newest acknowledged one."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.campaigns import CountCases
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
from accelerate.utils import ProjectConfiguration
from ckpt.adapters.adapt import accelerate
from helpers.crash_states import leave_out
from helpers.power_loss import acknowledge

mount, left_out = sys.argv[1:]
leave_out(left_out, accelerate)
project = ProjectConfiguration(mount, automatic_checkpoint_naming=True, total_limit=1)
named, automatic = (Accelerator(cpu=True, project_config=config) for config in (None, project))
for accelerator in (named, automatic):
    accelerator.prepare(torch.nn.Linear(4, 4))
    accelerate.SavedFolders(accelerator)
for number in range(3):
    named.save_state(f"{mount}/out/step_{number}")
    acknowledge(mount, f"step-{number}")
    automatic.save_state()
    acknowledge(mount, f"automatic-{number}")
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
    """Return what is wrong with the folders of accelerate, None if each one is whole and no acknowledged one is missing.

    Of the folders with automatic names, only the newest is kept.
    """
    acknowledged = [name.partition("-") for name in state.acknowledged]
    found = {path.name for path in (folder / "out").glob("step_*")}
    if missing := {f"step_{number}" for kind, _, number in acknowledged if kind == "step"} - found:
        return f"the folders {missing} are missing"
    newest = max((int(path.name.rpartition("_")[2]) for path in (folder / "checkpoints").glob("checkpoint_*")), default=-1)
    if newest < max((int(number) for kind, _, number in acknowledged if kind == "automatic"), default=-1):
        return f"checkpoint_{newest} is the newest folder"
    folders = [folder / "out" / name for name in found] + [folder / "checkpoints" / f"checkpoint_{newest}"] * (newest >= 0)
    try:
        for each in folders:
            ckpt.load(each / "ckpt")
    except ckpt.CkptError as error:
        return str(error)
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
def test_acknowledged_steps_are_found_after_a_power_loss_at_any_moment(
    tmp_path: Path, program: str, wrong_in: object, count_cases: CountCases
) -> None:
    assert first_wrong(record(tmp_path, program), wrong_in, *AMOUNT, count_cases=count_cases) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("program", "wrong_in"), [(ACCELERATE, wrong_in_folders), (MARKERS, wrong_in_markers)])
def test_a_missing_fsync_of_the_folder_is_found(tmp_path: Path, program: str, wrong_in: object) -> None:
    """Else the test above could not fail."""
    assert first_wrong(record(tmp_path, program, "sync_folder"), wrong_in, 1) is not None  # type: ignore[arg-type]
