"""Folders of accelerate whose save was killed, stopped or failed: who deletes them, and who leaves them alone."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from helpers.processes import finish, python, wait_until_stopped

import ckpt

PROGRAM = """
import os, sys
import torch
from accelerate import Accelerator
from ckpt.adapters.adapt.accelerate import SavedFolders

folder, end = sys.argv[1:]
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(4, 4))
SavedFolders(accelerator)
if end == "before its name":
    sys.addaudithook(lambda event, values: event == "os.rename" and values[1] == folder and os._exit(9))
try:
    accelerator.save_state(folder)
except Exception as error:
    if end != "failure":
        raise
    print(type(error).__name__, error)
"""


def saving(folder: Path, end: str = "", failpoints: str = "") -> Any:
    """Start a process that saves a model into a folder."""
    return python(PROGRAM, folder, end, env={"CKPT_FAILPOINTS": failpoints})


def killed(folder: Path) -> None:
    """Let a process save into a folder that is killed before its commit."""
    process = saving(folder, failpoints="save.manifest=kill")
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL


def left(parent: Path) -> list[str]:
    """Return the names in a folder, the tokens of incomplete folders as `*`."""
    names = [path.name.split(".") for path in parent.iterdir()]
    return sorted(".".join("*" if len(part) == 16 else part for part in parts) for parts in names)


def test_a_save_deletes_the_incomplete_folder_of_a_dead_process(tmp_path: Path) -> None:
    """It has another name: the script saves at other steps now."""
    killed(tmp_path / "step_1")
    assert left(tmp_path) == [".step_1.*.ckpt-incomplete"]
    finish(saving(tmp_path / "step_2"), 300)
    assert left(tmp_path) == ["step_2"]


def test_a_save_leaves_the_incomplete_folder_of_a_live_process(tmp_path: Path) -> None:
    slow = saving(tmp_path / "step_1", failpoints="save.manifest=stop")
    try:
        wait_until_stopped(slow)
        finish(saving(tmp_path / "step_2"), 300)
        assert left(tmp_path) == [".step_1.*.ckpt-incomplete", "step_2"]
        slow.send_signal(signal.SIGCONT)
        finish(slow, 300)
    finally:
        slow.kill()
        slow.wait()
    assert left(tmp_path) == ["step_1", "step_2"]
    assert [checkpoint.step for checkpoint in ckpt.open(tmp_path / "step_1" / "ckpt")] == [0]


def test_a_folder_without_a_lease_is_deleted_by_a_save_of_its_name_alone(tmp_path: Path) -> None:
    """A process that has released its lease may be about to rename the folder."""
    process = saving(tmp_path / "step_1", "before its name")
    process.communicate(timeout=300)
    assert process.returncode == 9
    (tmp_path / ".step_1.5.0123456789abcdef.ckpt-incomplete").mkdir()  # of a process that has no lease yet
    finish(saving(tmp_path / "step_2"), 300)
    assert left(tmp_path) == [".step_1.*.ckpt-incomplete", ".step_1.5.*.ckpt-incomplete", "step_2"]
    finish(saving(tmp_path / "step_1"), 300)
    assert left(tmp_path) == [".step_1.5.*.ckpt-incomplete", "step_1", "step_2"]


def test_a_failed_save_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    printed = finish(saving(tmp_path / "out" / "step_1", "failure", "save.manifest=full@*"), 300)
    assert "Errno 28" in printed
    assert left(tmp_path / "out") == []


LOADS = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from ckpt.adapters.adapt.accelerate import SavedFolders

project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
model = accelerator.prepare(torch.nn.Linear(4, 4))
if sys.argv[2] == "save":
    accelerator.save_state()
else:
    SavedFolders(accelerator)
    accelerator.load_state()
print(model.weight.sum().item())
"""


def test_an_incomplete_folder_is_not_taken_for_the_newest_that_accelerate_saved(tmp_path: Path) -> None:
    """accelerate saved without ckpt, and the first save with ckpt was killed."""
    saved = finish(python(LOADS, tmp_path, "save"), 300)
    killed(tmp_path / "checkpoints" / "checkpoint_1")
    assert left(tmp_path / "checkpoints") == [".checkpoint_1.*.ckpt-incomplete", "checkpoint_0"]
    assert finish(python(LOADS, tmp_path, "load"), 300) == saved
