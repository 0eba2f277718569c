"""Ranks are killed one by one at every fail point of a save, and the other ranks end with an error."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.folders import fast_folder
from helpers.processes import SOAK, until
from helpers.saving_ranks import SIZE, clean, next_lines, results_of, start

import ckpt

POINTS = (
    "save.stage", "save.append", "save.pack", "ranks.part", "local.rename",
    "ranks.gather", "ranks.merge", "save.manifest", "save.commit", "save.committed",
)  # fmt: skip
ONLY_RANK_0 = {"ranks.gather", "ranks.merge", "save.manifest", "save.commit", "save.committed"}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts and kills processes as Linux has them")


def check_next_job_continues(root: Path, least: int | None, size: int) -> int:
    """Check that earlier steps are whole and that the next job of all ranks continues; return the first step of that job."""
    ended = results_of(start(size, "train", root, steps=1, wait=True))
    assert all(status == 0 for status, _, _ in ended), [err[-2000:] for _, _, err in ended]
    first = {line["start"] for _, next_lines, _ in ended for line in next_lines if "start" in line}
    assert len(first) == 1, "the ranks continued from different steps"
    first_step = first.pop()
    assert least is None or first_step > least
    for number in ckpt.open(root).steps():
        assert ckpt.open(root)[number].verify() > 0
    return int(first_step)


CASES = [
    (point, victim, k)
    for point in POINTS
    for victim in ([0] if point in ONLY_RANK_0 else range(SIZE) if SOAK else [0, SIZE - 1])
    for k in ((1, 2, 3, 5) if SOAK else (2,))
]


def check_killed_rank(root: Path, point: str, victim: int, k: int) -> None:
    """Run a job whose rank `victim` dies at a fail point: all its ranks end, and the next job continues from a whole step."""
    ended = results_of(start(SIZE, "train", root, steps=k + 2, victim=victim, failpoints=f"{point}=kill@{k}", timeout=8))
    assert ended[victim][0] == -signal.SIGKILL, ended[victim]
    committed = [line["committed"] for _, next_lines, _ in ended for line in next_lines if "committed" in line]
    for rank, (status, _, err) in enumerate(ended):
        if rank != victim:
            assert status == 1, (rank, err[-2000:])
            assert re.search("SaveFailed|RanksMissing|StepRefused", err), err[-2000:]
    check_next_job_continues(root, max(committed, default=None), SIZE)


@pytest.mark.soak
def test_a_rank_killed_at_any_fail_point_ends_the_job_and_leaves_complete_steps(
    tmp_path: Path, count_cases: CountCases
) -> None:
    """The jobs mostly wait for the end of each other's ranks, so several jobs run at the same time."""
    with fast_folder(tmp_path) as fast, ThreadPoolExecutor(5) as pool:
        jobs = {case: pool.submit(check_killed_rank, fast / "-".join(map(str, case)), *case) for case in CASES}
        failed = {case: job.exception() for case, job in jobs.items() if job.exception() is not None}
    count_cases(len(jobs))
    assert not failed, failed


SAVER = """
import os, sys
import numpy as np
import ckpt
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
state = {"w": ckpt.Shard(np.full(1000, rank), (1000 * size,), (1000 * rank,))}
for step in range(1000):
    print(step, flush=True)
    input()
    try:
        ckpt.save(state, sys.argv[1], step=step)
    except ckpt.CkptError as error:
        print(type(error).__name__, error, flush=True)
"""


def start_savers(size: int, url: Path) -> list[subprocess.Popen[str]]:
    """Start ranks that save one step for each line of their standard input, with the default timeout."""
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            [sys.executable, "-c", SAVER, str(url)], env=clean() | {"RANK": str(rank), "WORLD_SIZE": str(size)},
            stdin=pipe, stdout=pipe, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def save_next_step(ranks: Sequence[subprocess.Popen[str]]) -> None:
    """Let each of these ranks save its next step."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


def test_the_other_ranks_do_not_wait_for_a_killed_rank(tmp_path: Path) -> None:
    """Ranks on the same host see that it is dead, so they do not wait for a timeout."""
    ranks = start_savers(3, tmp_path / "r")
    try:
        assert next_lines(ranks) == ["0"] * 3
        save_next_step(ranks)
        assert next_lines(ranks) == ["1"] * 3
        ranks[1].kill()
        ranks[1].wait()
        others = [ranks[0], ranks[2]]
        save_next_step(others)
        for line in next_lines(others):
            assert line.startswith("RanksMissing"), line
            assert "rank 1 of 3 did not write its part of step 1 and has ended" in line
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ckpt.open(tmp_path / "r").steps() == [0]


def test_waiting_ranks_report_that_the_repository_was_deleted(tmp_path: Path) -> None:
    """Some systems clear /dev/shm now and then. The ranks see that their files are gone, and do not wait for parts that cannot
    arrive."""
    ranks = start_savers(2, tmp_path / "r")
    try:
        assert next_lines(ranks) == ["0"] * 2
        save_next_step(ranks)
        assert next_lines(ranks) == ["1"] * 2
        save_next_step(ranks[:1])
        while not list((tmp_path / "r").glob("steps/1/part/0-*.arrow")):
            assert ranks[0].poll() is None
        shutil.rmtree(tmp_path / "r")
        (line,) = next_lines(ranks[:1])
        assert "is missing: the folder was deleted or emptied during a save" in line, line
        save_next_step(ranks[1:])
        (line,) = next_lines(ranks[1:])
        assert "is missing: the folder was deleted or emptied during a save" in line, line
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_remaining_ranks_of_a_killed_job_add_nothing_to_the_next_job(tmp_path: Path) -> None:
    """Every rank but the committer continues for a while after the next job has started."""
    ranks = start(3, "train", tmp_path, steps=1000, timeout=60)
    try:
        while not (tmp_path / "steps/1/commit.json").exists():
            assert all(process.poll() is None for process in ranks)
        ranks[0].kill()
        first_step = check_next_job_continues(tmp_path, 0, 3)
        assert first_step >= 1
    finally:
        for process in ranks:
            process.kill()
        stderr_of_killed = [process.communicate()[1] for process in ranks]
    assert len(stderr_of_killed) == 3
    for number in ckpt.open(tmp_path).steps():
        ckpt.open(tmp_path)[number].verify()
    assert {c.commit.generation for c in ckpt.open(tmp_path)} <= {1, 2}


def test_ranks_with_different_run_ids_do_not_meet_and_warn(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np, ckpt\n"
        "from ckpt.groups import EnvGroup, store_rendezvous\n"
        "store_rendezvous._WARN_SECONDS = 0.5\n"
        "ckpt.save({'w': np.ones(3)}, sys.argv[1], 0, group=EnvGroup(timeout=float(sys.argv[2])))\n"
    )

    def start_rank(rank: int, timeout: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(timeout)], stderr=subprocess.PIPE, text=True,
            env=clean() | {"RANK": str(rank), "WORLD_SIZE": "2", "CKPT_RUN_ID": f"start-{rank}"},
        )  # fmt: skip

    ranks = [start_rank(0, 15)]
    until(lambda: list(tmp_path.glob("meet/*/open")))  # rank 1 must find the rendezvous of the other name when it warns
    ranks.append(start_rank(1, 2))
    stderr = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "waiting for rank 1 at " in stderr[0]
    assert "waiting for rank 0 at " in stderr[1]
    assert "ranks with another CKPT_RUN_ID, MASTER_ADDR or MASTER_PORT use or used this store" in stderr[1]
    assert not list(tmp_path.glob("steps/*"))
