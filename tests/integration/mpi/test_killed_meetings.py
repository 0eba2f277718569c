"""Ranks as processes meet at a store, are killed, and are started again."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.meetings import elsewhere, env_groups, gather, meet, rank_process, words
from helpers.meetings import folder as folder
from helpers.processes import finish, until
from helpers.repositories import files

from ckpt.storage.local.directory import LocalStore


@pytest.mark.parametrize("first", [0, 1, 2])
def test_ranks_come_when_they_come(folder: Path, first: int) -> None:
    early = rank_process(folder, first, 3)
    time.sleep(0.5)
    assert early.poll() is None
    later = [rank_process(folder, rank, 3) for rank in range(3) if rank != first]
    for rank in (early, *later):
        finish(rank)


@pytest.mark.parametrize("when", ["before all have met", "in a gather"])
def test_a_meeting_of_killed_processes(folder: Path, when: str) -> None:
    """Killed with all that they had said; the next incarnation, of the same names, meets as if nothing had been."""
    meeting = folder / "repository/meet"
    if when == "in a gather":
        killed = [rank_process(folder, rank, 3, AFTER="gather" if rank < 2 else "stay") for rank in range(3)]
        until(lambda: [*meeting.glob("*/0-0")] and [*meeting.glob("*/0-1")])
    else:
        killed = [rank_process(folder, rank, 3) for rank in (0, 1)]
        until(lambda: [*meeting.glob("*/hello-1-*")])
    for process in killed:
        process.kill()
        process.communicate()
    (stale,) = meeting.iterdir()
    assert (stale / "members.json").exists() is (when == "in a gather")
    ranks = [rank_process(folder, rank, 3) for rank in (2, 1, 0)]
    for rank in ranks:
        finish(rank)
    assert not files(folder / "repository"), "neither meeting is left"


def test_a_meeting_of_the_living_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that reads the same repository meets there too."""
    other = rank_process(folder, 0, 2, CKPT_RUN_ID="other", TIMEOUT=60)
    until(lambda: [*(folder / "repository").glob("meet/*/open")])
    groups = env_groups(2, monkeypatch)
    assert meet(groups, LocalStore(folder / "repository")) == [None, None]
    second = rank_process(folder, 1, 2, CKPT_RUN_ID="other", TIMEOUT=60)
    finish(other)
    finish(second)
    assert gather(groups, "here") == [words("here", 2)] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("launcher_lives", [False, True])
def test_a_rank_of_another_start_is_not_taken(folder: Path, launcher_lives: bool) -> None:
    """Of the job as it was before it was started again, or of another one at the same time: nothing names either."""
    launcher, other = elsewhere(folder, 1, 2)
    try:
        if not launcher_lives:
            launcher.kill()
            launcher.wait()
        zero = rank_process(folder, 0, 2, SETTLE=60)
        until(lambda: [*(folder / "repository").glob("meet/*/hello-1-*")])
        time.sleep(0.5)
        assert zero.poll() is None
        one = rank_process(folder, 1, 2)
        finish(zero)
        finish(one)
        assert Path(f"/proc/{other}").exists(), "it waits for its own rank 0"
    finally:
        os.kill(other, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize("shell", ["stays", "ends"])
@pytest.mark.parametrize(("settle", "timeout"), [(0.2, 60), (60, 3)])
def test_ranks_that_different_processes_have_started(folder: Path, shell: str, settle: float, timeout: float) -> None:
    """Each in a shell of its own, which may end: they meet, once it is plain, or too late, that nobody else says to be one."""
    launcher, other = elsewhere(folder, 1, 2)
    try:
        if shell == "ends":
            launcher.kill()
            launcher.wait()
        finish(rank_process(folder, 0, 2, SETTLE=settle, TIMEOUT=timeout))
        if shell == "stays":
            finish(launcher)
        else:
            until(lambda: (folder / "1.json").exists())
        until(lambda: len([*folder.glob("?.json")]) == 2)
    finally:
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()
