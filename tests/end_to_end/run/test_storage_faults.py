"""A job under ckpt-run whose storage fails: nodes die, disks fill up, bytes flip."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from helpers.faulty_runs import Starter, assert_ends_well, nodes, nonempty_files, url_of
from helpers.faulty_runs import start as start
from helpers.flipped_bits import flip_bit
from helpers.folders import fast_folder
from helpers.host_runs import job as job
from helpers.processes import stop, until
from helpers.repositories import snapshot
from helpers.runs import RANKS, memory_folder_of

import ckpt
from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.policy.restart_decision import MAX_REPEATED_FAILURES, Budget, decide
from ckpt.storage.local.durable_writer import is_temporary


def test_a_job_continues_after_a_storage_node_is_killed(start: Starter, tmp_path: Path) -> None:
    """No rank needs to start again."""
    with nodes(tmp_path, 3) as storage:
        run = start(url=url_of(storage), seconds=0.05)
        run.until_step(12)
        storage[0].kill()
        assert_ends_well(run)
        assert run.failures() == []
        assert ckpt.open(url_of(storage)).steps()[-1] == 39


def test_a_job_restarts_although_a_storage_node_is_killed(start: Starter, tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as storage:
        run = start(url=url_of(storage), seconds=0.05, failpoints="namespace.read=sleep:0.3@*")
        run.until_step(12)
        run.kill_ranks()
        until(lambda: (beat := run.beat(0, attempt=1)) is not None and beat.phase == "load", "it restores")
        storage[1].kill()
        assert_ends_well(run)
        assert [cause for cause, _ in run.failures()] == ["signal"]


def test_a_job_survives_all_storage_nodes_being_away_for_a_while(start: Starter, tmp_path: Path) -> None:
    """They are away for longer than several failures in a row take."""
    with nodes(tmp_path, 2) as storage:
        run = start(url=url_of(storage), seconds=0.05)
        run.until_step(12)
        for node in storage:
            node.kill()
        until(lambda: run.kinds().count("failure") > MAX_REPEATED_FAILURES, "a save has failed, and then some restarts")
        for node in storage:
            node.start()
        assert_ends_well(run)
        assert min(run.restored()) >= 5


def test_a_job_that_has_trained_is_given_up_late() -> None:
    """Where it does not reach a step any more, it waits longer and longer, but not forever."""
    failures = [Failure("exit", (1,), "exited with status 1", 12, 9, 10.0)]
    budget = Budget()
    waits = []
    while (decision := decide(failures, budget)).action == "restart" and len(waits) < 100:
        budget = decision.budget
        waits.append(decision.wait_seconds)
        failures.append(Failure("exit", (1,), "exited with status 1", -1, -1, 1.0))
    assert len(waits) == Budget().max_restarts
    assert waits == sorted(waits)
    assert sum(waits) > 60
    assert decision.reason.endswith("before the first step; 10 restarts without a newer step: look at the log")


def test_a_job_without_a_whole_step_is_given_up_after_three_tries() -> None:
    """Damage does not go away: the reason names what to do."""
    failures, budget = [Failure("exit", (1,), "exited with status 1", 12, 9, 10.0, restored=5)], Budget()
    while (decision := decide(failures, budget)).action == "restart":
        budget = decision.budget
        failures.append(Failure("damaged", (0, 1), "exited with status 1", -1, -1, 1.0))
    assert len(failures) == 1 + MAX_REPEATED_FAILURES
    assert "3 times in a row, as all saved steps are damaged; restore the files of one, or remove all" in decision.reason


def test_memory_on_two_nodes_survives_the_loss_of_one_with_a_rank(start: Starter, tmp_path: Path) -> None:
    """A lost host takes its part of the memory tier with it. The other node has every step but that of a save under way."""
    with fast_folder(tmp_path) as folder, nodes(folder, 2) as memory:
        run = start(tiers=(url_of(memory, "near"),), seconds=0.1)
        run.until_step(12)
        memory[0].kill()
        os.kill(run.pid(1), signal.SIGKILL)
        assert_ends_well(run)
        (failure,) = [e for e in run.log() if e.kind == "failure"]
        assert min(run.restored()) > failure.facts["committed"]
        assert min(run.restored()) >= failure.facts["step"] - 1 >= 11
        assert ckpt.open(run.folder / "repo").steps()[-1] == 39


@pytest.mark.parametrize("point", ["save.append=full@2", "local.fsync=error@3", "save.commit=full@2"])
def test_a_failed_background_save_restarts_the_job(start: Starter, point: str) -> None:
    run = start(fault=f"points:0:{point}")
    assert_ends_well(run)
    assert [cause for cause, _ in run.failures()] == ["exit"], run.messages
    assert f"injected at fail point {point.partition('=')[0]}" in run.messages
    assert ckpt.open(run.folder / "repo").steps()[-1] == 39


def test_a_wait_for_a_step_fails_at_once_if_the_job_has_ended(start: Starter) -> None:
    """Otherwise a test whose job was faster than it would wait for ten minutes, and not show why."""
    run = start(seconds=0.0, steps=5)
    run.release()
    assert run.process.wait(300) == 0
    with pytest.raises(AssertionError, match="attempt 0 ended before step 12 was seen"):
        run.until_step(12)


def test_a_short_job_is_seen_by_a_test_that_comes_late(start: Starter) -> None:
    """Otherwise a busy machine decides what a test of a fault tests."""
    run = start(seconds=0.0, steps=5)
    until(
        lambda: (beat := run.beat(0, 0)) is not None and beat.step == 3 and beat.phase == "eval",
        "it waits before its last step",
    )
    run.until_step(3)
    run.kill_ranks()
    assert_ends_well(run, 5)
    assert [cause for cause, _ in run.failures()] == ["signal"]


def test_a_job_survives_a_disk_that_is_full_for_a_while(start: Starter, tmp_path: Path) -> None:
    """The disk is really full; then another process frees space."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting takes root")
    try:
        run = start(url=str(small / "repo"), seconds=0.05)
        run.until_step(12)
        with (small / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        until(lambda: "failure" in run.kinds(), "a save has failed")
        (small / "ballast").unlink()
        assert_ends_well(run)
        assert run.failures()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.parametrize("where", ["memory", "nvme", "repo", "memory nvme"])
def test_a_flipped_byte_in_a_tier_is_read_from_the_next_one(start: Starter, tmp_path: Path, where: str) -> None:
    """A byte of each file of the newest step in the tier is flipped: the step comes from the next tier, or an older step is
    loaded."""
    nvme = str(tmp_path / "nvme")
    run = start(tiers=("memory", nvme), seconds=0.06, steps=24)
    places = {"memory": memory_folder_of(run), "nvme": Path(nvme), "repo": run.folder / "repo"}
    run.until_step(13)
    stop(run.process.pid)
    run.kill_ranks()
    flipped = 0
    for name in where.split():
        commits = sorted(places[name].rglob("steps/*/commit.json"), key=lambda path: int(path.parent.name))
        for path in nonempty_files(commits[-1].parent, "*"):
            flip_bit(path)
            flipped += 1
    assert flipped >= 2
    run.process.send_signal(signal.SIGCONT)
    assert_ends_well(run, 24)
    assert len(run.failures()) == 1
    least = {"memory": 10, "nvme": 12, "repo": 12, "memory nvme": 5}
    assert min(run.restored()) >= least[where]
    saved = next(entry.facts["committed"] for entry in run.log() if entry.kind == "failure")
    assert ("the later steps are damaged" in run.messages) == (min(run.restored()) <= saved)
    assert ckpt.load(run.folder / "repo", group=None)["w"].shape == (4 * RANKS, 100)


def test_a_job_survives_a_cleared_memory_tier(start: Starter) -> None:
    """Another user may clean up /dev/shm while the ranks save to it."""
    run = start(tiers=("memory",), seconds=0.06, steps=40)
    memory = memory_folder_of(run)
    run.until_step(13)
    shutil.rmtree(memory, ignore_errors=True)
    assert_ends_well(run, 40)
    assert len(run.failures()) == 1


def test_a_job_whose_steps_are_all_damaged_is_given_up(start: Starter) -> None:
    """All tiers are damaged. The job is given up with the reason; the damaged steps are neither overwritten nor removed."""
    run = start(tiers=("memory",), seconds=0.06, steps=10_000)
    places = [memory_folder_of(run), run.folder / "repo"]
    run.until_step(7)
    stop(run.process.pid)
    run.kill_ranks()
    for path in [path for place in places for path in nonempty_files(place, "steps/**/*")]:
        if is_temporary(path.name):
            path.unlink()  # of a save that was killed; the next writer deletes it
        else:
            flip_bit(path)
    before = snapshot(run.folder / "repo/steps")
    run.process.send_signal(signal.SIGCONT)
    assert run.end() == 1
    assert list(places[0].rglob("steps/*/commit.json"))
    shutil.rmtree(places[0])
    assert [cause for cause, _ in run.failures()] == ["signal", *["damaged"] * MAX_REPEATED_FAILURES]
    assert (
        f"{MAX_REPEATED_FAILURES} times in a row, as all saved steps are damaged; restore the files of one, or remove all"
        in run.messages
    )
    assert re.search(rf"look at {run.files}/logs/{MAX_REPEATED_FAILURES}/rank-\d.log", run.messages)
    assert snapshot(run.folder / "repo/steps") == before
