"""Two writers and differences: a fenced writer can neither commit a difference nor delete the base that its successor needs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from helpers.drifting_states import assert_drifting_steps_load, base_of_weights, drifting_state, pack_step
from helpers.processes import python
from helpers.repositories import assert_clean

import ckpt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="detects live processes by /proc")

HOLDER = """
import sys, ckpt
from helpers.drifting_states import drifting_state
saver = ckpt.Checkpointer(sys.argv[1], every=None, keep=1, full_every=10)
for step in (1, 2):
    saver.save(step, drifting_state(step), blocking=True)
print("holding", flush=True)
sys.stdin.readline()
try:
    saver.save(3, drifting_state(3), blocking=True)
except ckpt.CkptError as error:
    print(type(error).__name__, flush=True)
"""


def test_the_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = python(HOLDER, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "holding\n"
    with pytest.raises(ckpt.RepositoryBusy):
        ckpt.save(drifting_state(9), tmp_path, 9, full_every=10)
    assert_drifting_steps_load(tmp_path, 2)
    first.communicate("\n", timeout=600)
    assert_drifting_steps_load(tmp_path, 3)


def test_a_successor_of_a_killed_writer_continues_with_its_base(tmp_path: Path) -> None:
    first = python(HOLDER, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "holding\n"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=600)
    ckpt.save(drifting_state(3), tmp_path, 3, keep=1, full_every=10)
    assert pack_step(base_of_weights(tmp_path, 3).pack) == 1
    assert assert_drifting_steps_load(tmp_path, 3) == [3]
    assert_clean(tmp_path)


def test_a_fenced_writer_neither_commits_a_difference_nor_deletes_a_base(tmp_path: Path) -> None:
    from helpers.two_writers import take_over

    first = python(HOLDER, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "holding\n"
    take_over(tmp_path, 1000)
    out, err = first.communicate("\n", timeout=600)
    assert "Fenced" in out, (out, err)
    assert assert_drifting_steps_load(tmp_path, 2) == [2]
