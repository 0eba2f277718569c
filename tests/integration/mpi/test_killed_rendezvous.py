"""Ranks as processes meet at a store, are killed, and are started again."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.processes import finish, until
from helpers.rendezvous import env_groups, gather, gathered, meet, rank_process, reports, start_through_a_launcher
from helpers.rendezvous import folder as folder
from helpers.repositories import files

from ckpt.storage.local.directory import LocalStore


@pytest.mark.parametrize("first", [0, 1, 2])
def test_ranks_meet_in_any_order_of_arrival(folder: Path, first: int) -> None:
    early = rank_process(folder, first, 3)
    time.sleep(0.5)
    assert early.poll() is None
    later = [rank_process(folder, rank, 3) for rank in range(3) if rank != first]
    for rank in (early, *later):
        finish(rank)


@pytest.mark.parametrize("when", ["before all have met", "in a gather"])
def test_restarted_ranks_meet_despite_a_rendezvous_of_killed_ones(folder: Path, when: str) -> None:
    """The ranks are killed and leave all their messages; the next incarnation, with the same names, meets as if there were
    none."""
    rendezvous = folder / "repository/meet"
    if when == "in a gather":
        killed = [rank_process(folder, rank, 3, AFTER="gather" if rank < 2 else "stay") for rank in range(3)]
        until(lambda: [*rendezvous.glob("*/0-0")] and [*rendezvous.glob("*/0-1")])
    else:
        killed = [rank_process(folder, rank, 3) for rank in (0, 1)]
        until(lambda: [*rendezvous.glob("*/hello-1-*")])
    for process in killed:
        process.kill()
        process.communicate()
    (stale,) = rendezvous.iterdir()
    assert (stale / "members.json").exists() is (when == "in a gather")
    ranks = [rank_process(folder, rank, 3) for rank in (2, 1, 0)]
    for rank in ranks:
        finish(rank)
    assert not files(folder / "repository"), "files of a rendezvous are left"


def test_a_rendezvous_of_live_processes_is_not_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job that reads the same repository meets there, too."""
    other = rank_process(folder, 0, 2, CKPT_RUN_ID="other", TIMEOUT=60)
    until(lambda: [*(folder / "repository").glob("meet/*/open")])
    groups = env_groups(2, monkeypatch)
    assert meet(groups, LocalStore(folder / "repository")) == [None, None]
    second = rank_process(folder, 1, 2, CKPT_RUN_ID="other", TIMEOUT=60)
    finish(other)
    finish(second)
    assert gather(groups, "here") == [gathered("here", 2)] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("launcher_lives", [False, True])
def test_a_rank_of_another_start_does_not_join(folder: Path, launcher_lives: bool) -> None:
    """It belongs to an earlier start of the job, or to another job at the same time; neither has a name."""
    launcher, other = start_through_a_launcher(folder, 1, 2)
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
        assert Path(f"/proc/{other}").exists(), "the other rank has ended instead of waiting for its own rank 0"
    finally:
        os.kill(other, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize("shell", ["stays", "ends"])
@pytest.mark.parametrize(("settle", "timeout"), [(0.2, 60), (60, 3)])
def test_ranks_started_by_different_shells_meet(folder: Path, shell: str, settle: float, timeout: float) -> None:
    """Each is started by a shell of its own, which may end: they meet as soon as it is certain, or at the timeout, that no
    other process claims the same rank."""
    launcher, other = start_through_a_launcher(folder, 1, 2)
    try:
        if shell == "ends":
            launcher.kill()
            launcher.wait()
        finish(rank_process(folder, 0, 2, SETTLE=settle, TIMEOUT=timeout))
        if shell == "stays":
            finish(launcher)
        else:
            until(lambda: (folder / "1.json").exists())
        until(lambda: len([file for file in folder.glob("?.json") if file.stat().st_size]) == 2)
        assert reports(folder, 2) == [[f"environment (RANK, WORLD_SIZE), rank {rank} of 2"] for rank in range(2)]
    finally:
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()
