"""Ranks as processes: killed one by one at every fail point, and the ones that are left."""

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
from helpers.folders import fast_folder
from helpers.processes import SOAK, until
from helpers.saving_ranks import SIZE, clean, ends, lines, start

import ckpt

POINTS = (
    "save.stage", "save.append", "save.pack", "ranks.part", "local.rename",
    "ranks.gather", "ranks.merge", "save.manifest", "save.commit", "save.committed",
)  # fmt: skip
ONLY_RANK_0 = {"ranks.gather", "ranks.merge", "save.manifest", "save.commit", "save.committed"}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts and kills processes as Linux has them")


def check(root: Path, least: int | None, size: int) -> int:
    """After a kill: earlier steps are whole, the next job of all ranks goes on. Returns its first step."""
    ended = ends(start(size, "train", root, steps=1, wait=True))
    assert all(status == 0 for status, _, _ in ended), [err[-2000:] for _, _, err in ended]
    first = {line["start"] for _, lines, _ in ended for line in lines if "start" in line}
    assert len(first) == 1, "the ranks went on from different steps"
    begun = first.pop()
    assert least is None or begun > least
    for number in ckpt.open(root).steps():
        assert ckpt.open(root)[number].verify() > 0
    return int(begun)


CASES = [
    (point, victim, k)
    for point in POINTS
    for victim in ([0] if point in ONLY_RANK_0 else range(SIZE) if SOAK else [0, SIZE - 1])
    for k in ((1, 2, 3, 5) if SOAK else (2,))
]


def killed(root: Path, point: str, victim: int, k: int) -> None:
    """A job whose rank `victim` dies at a point: every rank of it ends, and the next job goes on from a whole step."""
    ended = ends(start(SIZE, "train", root, steps=k + 2, victim=victim, failpoints=f"{point}=kill@{k}", timeout=8))
    assert ended[victim][0] == -signal.SIGKILL, ended[victim]
    committed = [line["committed"] for _, lines, _ in ended for line in lines if "committed" in line]
    for rank, (status, _, err) in enumerate(ended):
        if rank != victim:
            assert status == 1, (rank, err[-2000:])
            assert re.search("SaveFailed|RanksMissing|StepRefused", err), err[-2000:]
    check(root, max(committed, default=None), SIZE)


@pytest.mark.soak
def test_each_rank_killed_at_each_named_point(tmp_path: Path) -> None:
    """The cases mostly wait for each other's end, so that several run at once."""
    with fast_folder(tmp_path) as fast, ThreadPoolExecutor(5) as pool:
        jobs = {case: pool.submit(killed, fast / "-".join(map(str, case)), *case) for case in CASES}
        failed = {case: job.exception() for case, job in jobs.items() if job.exception() is not None}
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


def savers(size: int, url: Path) -> list[subprocess.Popen[str]]:
    """Ranks that save a step when they are told to, with the timeout that users have."""
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            [sys.executable, "-c", SAVER, str(url)], env=clean() | {"RANK": str(rank), "WORLD_SIZE": str(size)},
            stdin=pipe, stdout=pipe, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def go(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


def test_a_rank_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    """It is seen to be dead by the others of its host: no timeout is waited for."""
    ranks = savers(3, tmp_path / "r")
    try:
        assert lines(ranks) == ["0"] * 3
        go(ranks)
        assert lines(ranks) == ["1"] * 3
        ranks[1].kill()
        ranks[1].wait()
        others = [ranks[0], ranks[2]]
        go(others)
        for said in lines(others):
            assert said.startswith("RanksMissing"), said
            assert "rank 1 of 3 did not bring its part of step 1 and has ended" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ckpt.open(tmp_path / "r").steps() == [0]


def test_the_repository_is_removed_while_ranks_wait(tmp_path: Path) -> None:
    """As /dev/shm is cleared now and then. They hear of it, and don't wait for what can't come any more."""
    ranks = savers(2, tmp_path / "r")
    try:
        assert lines(ranks) == ["0"] * 2
        go(ranks)
        assert lines(ranks) == ["1"] * 2
        go(ranks[:1])
        while not list((tmp_path / "r").glob("steps/1/part/0-*.arrow")):
            assert ranks[0].poll() is None
        shutil.rmtree(tmp_path / "r")
        (said,) = lines(ranks[:1])
        assert "is missing: the folder was deleted or emptied during a save" in said, said
        go(ranks[1:])
        (said,) = lines(ranks[1:])
        assert "is missing: the folder was deleted or emptied during a save" in said, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_killed_job_s_ranks_do_not_add_to_the_next(tmp_path: Path) -> None:
    """Every rank but the committer goes on a while after the next job has begun."""
    ranks = start(3, "train", tmp_path, steps=1000, timeout=60)
    try:
        while not (tmp_path / "steps/1/commit.json").exists():
            assert all(process.poll() is None for process in ranks)
        ranks[0].kill()
        begun = check(tmp_path, 0, 3)
        assert begun >= 1
    finally:
        for process in ranks:
            process.kill()
        ends_of_killed = [process.communicate()[1] for process in ranks]
    assert len(ends_of_killed) == 3
    for number in ckpt.open(tmp_path).steps():
        ckpt.open(tmp_path)[number].verify()
    assert {c.commit.generation for c in ckpt.open(tmp_path)} <= {1, 2}


def test_ranks_of_two_names_do_not_meet_and_say_so(tmp_path: Path) -> None:
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
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "waiting for rank 1 at " in said[0]
    assert "waiting for rank 0 at " in said[1]
    assert "ranks with another CKPT_RUN_ID, MASTER_ADDR or MASTER_PORT use or used this store" in said[1]
    assert not list(tmp_path.glob("steps/*"))
