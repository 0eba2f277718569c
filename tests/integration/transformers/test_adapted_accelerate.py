"""A script that calls save_state and load_state of accelerate, and knows nothing of ckpt, under `ckpt-run --adapt`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.adapted_runs import Ended, run_adapted

import ckpt

PROGRAM = "plain_accelerate_training.py"


def assert_same_losses(whole: Ended, killed: Ended, kills: int) -> None:
    assert whole.status == killed.status == 0, whole.messages + killed.messages + "".join(killed.outputs)
    expected = whole.by_number
    assert set(expected) == set(range(28)) == {number for number, _ in killed.losses}
    assert [(number, loss) for number, loss in killed.losses if expected[number] != loss] == []
    assert len(killed.losses) < 28 * (kills + 1)  # it does not begin again
    assert len(killed.outputs) == kills + 1
    assert killed.outputs[0].count("save_state and load_state use ckpt") == 1
    assert "continues from " in killed.outputs[-1]
    assert "not adapted" not in "".join(killed.outputs)


@pytest.mark.parametrize("automatic", [False, True], ids=["names of the script", "automatic names"])
def test_a_killed_training_has_the_losses_of_an_undisturbed_one(tmp_path: Path, automatic: bool) -> None:
    """Two kills in the middle of epochs."""
    arguments = PROGRAM, json.dumps({"automatic": automatic})
    whole = run_adapted(tmp_path / "a", *arguments)
    killed = run_adapted(tmp_path / "b", *arguments, kill_after=(10, 20))
    assert_same_losses(whole, killed, 2)
    folders = sorted(path.name for path in (tmp_path / "b/out").rglob("*_*"))
    assert folders == (["checkpoint_7", "checkpoint_8"] if automatic else ["step_24", "step_27"])
    for folder in (tmp_path / "b/out").rglob("*_*"):
        assert [checkpoint.step for checkpoint in ckpt.open(folder / "ckpt")] == [0]
    assert not list((tmp_path / "b/out").rglob("*.safetensors"))


def test_a_kill_in_the_middle_of_a_save_leaves_no_folder(tmp_path: Path) -> None:
    """The third save is killed before its commit: the script finds the folders of the first two."""
    whole = run_adapted(tmp_path / "a", PROGRAM, "{}")
    options = "--adapt", "--restarts", "0"
    killed = run_adapted(tmp_path / "b", PROGRAM, "{}", options=options, CKPT_FAILPOINTS="save.manifest=kill@3")
    assert killed.status
    assert sorted(path.name for path in (tmp_path / "b/out").glob("step_*")) == ["step_3", "step_6"]
    assert [path.match(".step_9.*.ckpt-incomplete") for path in (tmp_path / "b/out").glob(".*")] == [True]
    again = run_adapted(tmp_path / "b", PROGRAM, "{}")
    assert again.status == 0, again.outputs
    assert again.losses[:9] == whole.losses[:9]
    assert again.losses[9:] == whole.losses[6:]
    assert not list((tmp_path / "b/out").glob(".*"))


def test_a_kill_in_the_middle_of_a_save_leaves_the_only_folder_before(tmp_path: Path) -> None:
    """With `total_limit` 1, the folder before is deleted once the new one is complete."""
    arguments = PROGRAM, json.dumps({"automatic": True, "total_limit": 1})
    options = "--adapt", "--restarts", "0"
    killed = run_adapted(tmp_path, *arguments, options=options, CKPT_FAILPOINTS="save.manifest=kill@3")
    assert killed.status
    folders = tmp_path / "out" / "checkpoints"
    assert [path.name for path in folders.glob("checkpoint_*")] == ["checkpoint_1"]
    again = run_adapted(tmp_path, *arguments)
    assert again.status == 0, again.outputs
    assert "continues from " in again.outputs[-1]
    assert [path.name for path in folders.glob("checkpoint_*")] == ["checkpoint_8"]


def test_two_killed_ranks_have_the_losses_of_undisturbed_ones(tmp_path: Path) -> None:
    whole = run_adapted(tmp_path / "a", PROGRAM, "{}", options=("--adapt", "-n", "2"))
    killed = run_adapted(tmp_path / "b", PROGRAM, "{}", options=("--adapt", "-n", "2"), kill_after=(10,))
    assert_same_losses(whole, killed, 1)


def test_ranks_agree_on_a_folder_that_the_script_makes(tmp_path: Path) -> None:
    """Rank 0 makes it when rank 1 is in save_state already."""
    ended = run_adapted(tmp_path, PROGRAM, json.dumps({"makes_folders": True}), options=("--adapt", "-n", "2"))
    assert ended.status == 0, ended.messages + "".join(ended.outputs)
    assert "not adapted" not in "".join(ended.outputs)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step_24", "step_27"]
    for folder in (tmp_path / "out").iterdir():
        assert [checkpoint.step for checkpoint in ckpt.open(folder / "ckpt")] == [0]


SAVES_IN_RANK_0_ALONE = """
import sys, time
from pathlib import Path
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(2, 1))
if accelerator.is_main_process:
    accelerator.save_state("out")
deadline = time.monotonic() + 200
while not any("waits for" in log.read_text() for log in Path("run").rglob("rank-0.log")) and time.monotonic() < deadline:
    time.sleep(0.1)
"""


def test_a_save_in_the_main_process_alone_is_explained(tmp_path: Path) -> None:
    """It waits for the other ranks. Here they end once the message is printed."""
    (tmp_path / "script.py").write_text(SAVES_IN_RANK_0_ALONE)
    ended = run_adapted(tmp_path, str(tmp_path / "script.py"), options=("--adapt", "-n", "2", "--restarts", "0"))
    assert ended.outputs[0].count("save_state waits for the other ranks") == 1


def test_a_loop_that_never_saves_is_not_changed(tmp_path: Path) -> None:
    """Nothing is saved, and a message says why."""
    plain = run_adapted(tmp_path / "a", PROGRAM, json.dumps({"never_saves": True}), options=())
    ended = run_adapted(tmp_path / "b", PROGRAM, json.dumps({"never_saves": True}))
    assert plain.status == ended.status == 0
    assert ended.losses == plain.losses
    assert "A loop that does not call them saves nothing: only the script knows its position" in ended.outputs[0]
    assert not (tmp_path / "b/out").exists()
