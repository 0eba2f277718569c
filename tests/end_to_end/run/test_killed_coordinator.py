"""ckpt-run is killed and stopped at its fail points, and signals arrive at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from helpers.faulty_runs import MARK, RUN, Starter, assert_ends_well
from helpers.faulty_runs import start as start
from helpers.host_runs import Job, assert_result, leader_of, starts
from helpers.host_runs import job as job
from helpers.processes import SOAK, stop, until
from helpers.runs import RANKS, memory_folder_of

from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.training.heartbeat_page import HeartbeatPage

ALL_POINTS = [f"coordinator.{kind}{written}" for kind in ("start", "failure", "stop", "end") for written in ("", ".written")]
ALL_POINTS += ["agent.start", "agent.started", "agent.stop"]


SOME_POINTS = ["coordinator.start.written", "coordinator.failure", "coordinator.stop.written", "agent.started"]
POINTS = ALL_POINTS if SOAK else SOME_POINTS


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
def test_ckpt_run_killed_at_any_point_continues_when_started_again(start: Starter, point: str) -> None:
    """On a single host no other agent takes over: started again, it continues from the last saved step."""
    run = start("--cold", failpoints=f"{point}=kill", steps=20, seconds=0.03)
    if "failure" in point or "coordinator.stop" in point:
        until(lambda: run.newest() >= 4, "something is saved")
    if "failure" in point:
        os.kill(run.pid(1), signal.SIGKILL)
    if "coordinator.stop" in point:
        run.process.send_signal(signal.SIGTERM)
    assert run.end() == -signal.SIGKILL, run.messages
    until(lambda: not processes.find_processes([], f"{MARK}={run.folder.parent}"), "its ranks have ended")
    saved = run.newest()
    again = start("--cold", steps=20)
    assert_ends_well(again, 20)
    assert again.restored() == [saved + 1] * RANKS
    assert again.kinds()[-1] == "end"


@pytest.mark.parametrize("point", ["promote.pack", "promote.committed"])
def test_ckpt_run_killed_while_it_drains_memory_loses_no_step(start: Starter, point: str) -> None:
    run = start("--restarts", "0", tiers=("memory",), seconds=0.05, failpoints=f"{point}=kill", quiet_ranks=True)
    memory = memory_folder_of(run)
    run.until_step(12)
    run.kill_ranks()
    assert run.end() == -signal.SIGKILL, run.messages
    saved = max(int(commit.parent.name) for commit in memory.rglob("commit.json"))
    assert saved >= 10  # the saves of the last two steps may have been under way
    again = start(tiers=("memory",))
    assert_ends_well(again)
    assert min(again.restored()) == saved + 1
    assert not [path for path in memory_folder_of(run).rglob("*") if path.is_file()]


def test_ranks_continue_while_ckpt_run_is_stopped(start: Starter) -> None:
    """The run ends well after ckpt-run continues."""
    run = start("--hang", "1", steps=80)
    run.until_step(5)
    stop(run.process.pid)
    run.until_step(60)
    run.process.send_signal(signal.SIGCONT)
    assert_ends_well(run, 80)
    assert run.failures() == []


@pytest.mark.parametrize("whom", ["ckpt-run", "ranks", "all"])
def test_many_sigterms_during_a_save_leave_complete_steps(start: Starter, whom: str) -> None:
    """A scheduler may signal all processes of a job, again and again."""
    run = start(fault="points:0:save.append=sleep:2@2")
    repo = run.folder / "repo" / "steps"
    until(lambda: any(not (step / "commit.json").exists() for step in repo.glob("*") if int(step.name) > 4), "it saves")
    targets = [run.process.pid] * (whom != "ranks") + [run.pid(rank) for rank in range(RANKS)] * (whom != "ckpt-run")
    for _ in range(20):
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.005)
    if whom == "ranks":
        assert_ends_well(run)
        return
    assert run.end() == 128 + signal.SIGTERM, run.messages
    saved = run.newest()
    again = start()
    assert_ends_well(again)
    assert again.restored() == [saved + 1] * RANKS
    assert saved >= 4


def test_a_sigterm_to_each_process_saves_the_present_step(start: Starter) -> None:
    """systemd ends a service with one signal to each process. No step since the last save is lost."""
    run = start(steps=200)
    run.until_step(11)
    for pid in (*(run.pid(rank) for rank in range(RANKS)), run.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.messages
    assert "have saved and ended on SIGTERM" in run.messages
    saved = run.newest()
    again = start(steps=200)
    assert_ends_well(again, 200)
    assert again.restored() == [saved + 1] * RANKS


def test_a_sigterm_to_one_rank_restarts_the_job(start: Starter) -> None:
    """The signal to one rank does not ask the job to end: it starts again."""
    run = start(steps=200)
    run.until_step(11)
    os.kill(run.pid(1), signal.SIGTERM)
    assert_ends_well(run, 200)
    assert run.failures() == [("signal", [1])]
    assert "rank 1 was asked to end by SIGTERM after step" in run.messages


def test_children_of_a_rank_are_ended_by_sigterm(tmp_path: Path) -> None:
    """A worker of a data loader ends by the signal. A handler of the program itself is not replaced, either."""
    program = (
        "import ckpt, os, signal, time\n"
        "ck = ckpt.Checkpointer('a'); assert callable(signal.getsignal(signal.SIGTERM))\n"
        "if (child := os.fork()) == 0: time.sleep(1000)\n"
        "os.kill(child, signal.SIGTERM); assert os.waitpid(child, 0)[1] == signal.SIGTERM\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "ckpt.Checkpointer('b').close(); assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN\n"
    )
    HeartbeatPage(tmp_path / "page", new=True).close()
    environment = os.environ | {"CKPT_PULSE": str(tmp_path / "page")}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=600)


def test_a_job_survives_the_loss_of_a_host_and_the_coordinator(job: Callable[..., Job]) -> None:
    run = job("--min", "2", hosts=4, steps=200)
    for name in "abcd":
        run.start(name)
    until(lambda: all(run._step(run.folder / f"at-0-{rank}") >= 12 for rank in range(8)), "step 12")
    log = run.log()
    leader = leader_of(log)
    other = next(name for name in starts(log)[0] if name != leader)
    for name in (leader, other):
        run.agents[name].kill()
        run.agents[name].wait()
    earlier_entries = len(run.log())  # on a slow machine other agents may have led before
    left = sorted(set("abcd") - {leader, other})
    assert set(run.ends(*left).values()) == {0}
    log = run.log()
    assert sorted(starts(log)[-1]) == left
    assert {entry.facts["name"] for entry in log[earlier_entries:] if entry.kind == "lead"} <= set(left)
    assert leader_of(log) in left
    assert_result(run, 4)


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield a control group whose processes together get no more memory than this limit."""
    old = Path("/sys/fs/cgroup/memory")
    group = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"ckpt-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit_bytes))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


def test_a_rank_killed_for_lack_of_memory_is_reported(start: Starter) -> None:
    """The kernel really kills the rank."""
    with memory_group(800 << 20) as group:
        run = start("--hang", "60", fault="memory:2:17", group=group)
        assert_ends_well(run)
    assert run.failures() == [("out of memory", [2])]
    assert "rank 2 was killed by the kernel, as there was no memory left (SIGKILL)" in run.messages


TOGETHER = """
import os, sys
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
import ckpt
folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"w": torch.zeros(100, dtype=torch.float64)}
with ckpt.Checkpointer(folder / "repo", every=3, keep=2) as ck:
    state, start = ck.restore(state)
    for step in range(start, 12):
        part = torch.full((100,), (step + 1) / (rank + 3), dtype=torch.float64)
        if (step, rank, os.environ["CKPT_ATTEMPT"]) == (7, 1, "0"):
            raise ValueError("a bad batch")
        dist.all_reduce(part)
        state["w"] += part
        ck.step(step, state)
np.save(folder / f"end-{rank}.npy", state["w"].numpy())
"""


def test_an_exception_restarts_ranks_that_wait_in_a_collective(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is missing")
    program = tmp_path / "train.py"
    program.write_text(TOGETHER)
    command = [*RUN, "-n", "2", "--run-dir", str(tmp_path / "run"), "--", sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    failures = [entry for entry in SqliteRunLog(tmp_path / "run").entries() if entry.kind == "failure"]
    assert [entry.facts["cause"] for entry in failures] == ["exit"]
    assert "ValueError: a bad batch" in (tmp_path / "run" / "logs" / "0" / "rank-1.log").read_text()
    want = np.zeros(100)
    for step in range(12):
        want += (step + 1) / 3 + (step + 1) / 4
    for rank in range(2):
        assert np.array_equal(np.load(tmp_path / f"end-{rank}.npy"), want)
