"""Ranks as real processes: started by mpiexec, by torchrun, by hand; killed one by one at every named point."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import SOAK, TESTS, fast_folder, until

import ckpt

PROGRAM = TESTS / "ranks_program.py"
POINTS = (
    "save.stage", "save.append", "save.pack", "ranks.part", "local.rename",
    "ranks.gather", "ranks.merge", "save.manifest", "save.commit", "save.committed",
)  # fmt: skip
SIZE = 3
ONLY_RANK_0 = {"ranks.gather", "ranks.merge", "save.manifest", "save.commit", "save.committed"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts and kills processes as Linux has them")


def start(size: int, what: str, url: Path, **options: Any) -> list[subprocess.Popen[str]]:
    """The ranks as plain processes, told by RANK and WORLD_SIZE: the store is all they share."""
    command = [sys.executable, str(PROGRAM), what, str(url), json.dumps(options)]
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            command, env=clean() | {"RANK": str(rank), "WORLD_SIZE": str(size)}, stdout=pipe, stderr=pipe, text=True
        )
        for rank in range(size)
    ]


def clean() -> dict[str, str]:
    """The environment without what a launcher may have left in it."""
    return {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|OMPI_|PMI|SLURM_|TORCHELASTIC", k)} | {
        "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip


def ends(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, list[dict[str, Any]], str]]:
    """Exit status, what was printed and the errors of each rank."""
    found = []
    for process in ranks:
        out, err = process.communicate(timeout=120)
        found.append((process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err))
    return found


def run(command: Sequence[str]) -> list[dict[str, Any]]:
    """What the ranks of a launcher print, by rank."""
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{done.stderr[:6000]}\n…\n{done.stderr[-3000:]}"
    lines = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
    return sorted((line for line in lines if "rank" in line), key=lambda line: int(line["rank"]))


def launcher(kind: str, size: int) -> list[str]:
    if kind == "mpiexec":
        pytest.importorskip("mpi4py")
        mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
        assert mpiexec, "no mpiexec: install the wheel mpich"
        return [mpiexec, "-n", str(size), sys.executable]
    pytest.importorskip("torch")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]


@pytest.mark.parametrize(
    ("kind", "imports", "name"),
    [("mpiexec", ["mpi4py.MPI"], "MPI"), ("mpiexec", [], "environment"), ("torchrun", ["torch.distributed"], "torch"),
     ("torchrun", [], "environment")],
)  # fmt: skip
def test_a_launcher_s_ranks_save_and_load(tmp_path: Path, kind: str, imports: list[str], name: str) -> None:
    options = json.dumps({"steps": 2, "imports": imports})
    saved = run([*launcher(kind, 4), str(PROGRAM), "train", str(tmp_path), options])
    assert [(line["rank"], line["size"]) for line in saved] == [(r, 4) for r in range(4)]
    assert all(name in line["group"] for line in saved), saved
    assert ckpt.open(tmp_path).steps() == [0, 1]
    assert ckpt.open(tmp_path)[1].commit.world_size == 4
    loaded = run([*launcher(kind, 4), str(PROGRAM), "load", str(tmp_path), options])
    assert [line["step"] for line in loaded] == [1] * 4


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


def lines(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each says next."""
    return [rank.stdout.readline().rstrip() for rank in ranks if rank.stdout is not None]


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


MEMORY = """
import resource, sys
import numpy as np
import ckpt
from ckpt.groups.threads import ThreadGroup
from test_ranks import Remote, all_well, on_ranks
import ckpt.loading.shared_read

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

ckpt.loading.shared_read.LocalStore = Remote
ranks = int(sys.argv[2])
if sys.argv[3] == "messages":
    ckpt.loading.shared_read.SharedWindow.create = lambda *_: None
targets = [np.ones((16384, 8192 // ranks), np.float32) for _ in range(ranks)]
before = peak()

def load(group):
    mine = targets[group.rank]
    like = {"w": ckpt.Shard(mine, (16384, 8192), (0, mine.shape[1] * group.rank))}
    ckpt.load(sys.argv[1], like, group=group)
    assert (mine == 7).all()

all_well(on_ranks(ranks, load))
print(peak() - before)
"""


@pytest.mark.parametrize(("ranks", "by"), [(1, "itself"), (2, "memory"), (2, "messages")])
def test_a_rank_needs_little_beside_its_shard(tmp_path: Path, ranks: int, by: str) -> None:
    """Columns of 512 MiB that were saved by rows, alone and with shared reads: 256 MiB more than the shards, at most."""
    whole = np.full((16384, 8192), 7, np.float32)
    ckpt.save({"w": whole}, tmp_path / "run", 0, codec="none")
    del whole
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "run"), str(ranks), by],
        env=clean(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) <= ranks * 256 << 20


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
