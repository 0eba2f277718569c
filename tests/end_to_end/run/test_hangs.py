"""ckpt-run detects that a job hangs, and names the rank."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.processes import stop
from helpers.runs import Run, assert_result
from helpers.runs import start as start
from helpers.thread_limits import refused_threads

from ckpt.recovery.policy.hang_limits import HangLimits, uniform_initial_limits
from ckpt.recovery.ranks import processes
from ckpt.recovery.ranks.launch import start_ranks
from ckpt.recovery.ranks.rank_environment import LaunchSpec
from ckpt.recovery.ranks.rank_monitor import RankMonitor
from ckpt.recovery.ranks.stop_ranks import stop_ranks
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.tools import run_queries


@pytest.mark.parametrize("fault", ["loop", "dead-lock"])
def test_a_hung_rank_is_named_and_its_stacks_are_kept(start: Callable[..., Run], fault: str) -> None:
    """The stacks show where it hangs."""
    run = start("--hang", "2", fault=(fault, 17, 2))
    assert run.end() == 0, run.messages
    assert_result(run)
    assert run.failures() == [("hang", [2])]
    assert "sent no heartbeat for" in run.messages
    kept = "".join(p.read_text() for p in (run.files / "logs" / "0").iterdir() if p.name.startswith("rank-2"))
    assert "job.py" in kept
    assert "main" in kept


@pytest.mark.parametrize("refused", [0, 1000])
def test_a_rank_writes_its_stacks_itself_where_py_spy_has_no_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """The log of the rank has the stacks then, also if the agent gets no more threads. refused: how many starts are refused."""
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\necho 'Error: Permission Denied'; exit 1")
    spy.chmod(0o755)
    program = (
        "import ckpt.training.heartbeat_page as p, time\np.own_page().beat(2, 7)\n"
        "def waits_for_ever():\n    open('begun', 'w').close(); time.sleep(1000)\nwaits_for_ever()"
    )
    share = LaunchSpec("r", 0, 0, 1, 1, 0, "127.0.0.1", 1, {})
    (tmp_path / "pages").mkdir()
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), sys.executable, "-c", program]
    ranks = start_ranks(command, share, tmp_path / "pages", tmp_path / "logs")
    try:
        deadline = time.monotonic() + 600
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline, ranks[0].log.read_text()
            time.sleep(0.01)
        watch = RankMonitor(ranks, HangLimits(), -1, straggler_seconds=60.0)
        watch.poll(time.monotonic())
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # ckpt-run looks for py-spy beside the interpreter
        with refused_threads(1, refused, ""):
            watch.save_stacks()
        assert "Permission Denied" in (tmp_path / "logs" / "rank-0.stacks").read_text()
        while "waits_for_ever" not in ranks[0].log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        stop_ranks(ranks, "")


@contextlib.contextmanager
def monitored(program: str, size: int, folder: Path, limits: HangLimits) -> Iterator[tuple[RankMonitor, Iterator[None]]]:
    """Start ranks that run a program; each item of the iterator polls them once, for at most ten minutes."""
    share = LaunchSpec("r", 0, 0, size, size, 0, "127.0.0.1", 1, {})
    ranks = start_ranks([sys.executable, "-c", program], share, folder, folder / "logs")
    watch, deadline = RankMonitor(ranks, limits, -1, straggler_seconds=60.0), time.monotonic() + 600

    def polls() -> Iterator[None]:
        while True:
            assert time.monotonic() < deadline
            watch.poll(time.monotonic())
            yield
            time.sleep(0.01)

    try:
        yield watch, polls()
    finally:
        stop_ranks(ranks, "")


@contextlib.contextmanager
def monitor_until_failure(program: str, size: int, folder: Path, start_seconds: float = 300.0) -> Iterator[RankMonitor]:
    """Start ranks that run a program, and return their monitor when it has found a failure.

    start_seconds: the limit of the phase "start". The others have a limit of 5 s, but on a busy machine a rank may take longer
        to start.
    """
    limits = HangLimits(least_seconds=0.5, initial_limit_seconds={**uniform_initial_limits(5), "start": start_seconds})
    with monitored(program, size, folder, limits) as (watch, polls):
        while watch.failure is None:
            next(polls)
        yield watch


@pytest.mark.parametrize(("step", "more", "blamed", "detail"), [
    (8, "", 0, "; rank 1 had closed its Checkpointer after step 8)"),
    (7, "print('Traceback:\\nValueError: bad batch', flush=True)", 1, "; its log ends with: ValueError: bad batch)"),
])  # fmt: skip
def test_a_hang_names_a_rank_that_has_closed_its_checkpointer(
    tmp_path: Path, step: int, more: str, blamed: int, detail: str
) -> None:
    """An exception may end the loop of a rank while its process continues, because of other threads or a collective at its end.
    The other ranks wait for it in a step; where it is behind them it is the cause."""
    program = (
        "import ckpt.training.heartbeat_page as p, os, time\nrank = int(os.environ['RANK'])\n"
        f"p.own_page().attach_process(); p.own_page().beat(2, {step} if rank else 8)\n"
        f"if rank: p.own_page().beat(6); {more}\ntime.sleep(1000)"
    )
    with monitor_until_failure(program, 2, tmp_path) as watch:
        assert (watch.failure.cause, watch.failure.ranks) == ("hang", (blamed,))
        assert watch.failure.detail.endswith(detail)


def test_a_hang_names_a_rank_that_has_ended(tmp_path: Path) -> None:
    """It has ended with success, so it has not failed; but the other ranks may wait for it."""
    program = (
        "import ckpt.training.heartbeat_page as p, os, time\nrank = int(os.environ['RANK'])\n"
        "p.own_page().attach_process(); p.own_page().beat(2, 9 - rank)\nrank or time.sleep(1000)"
    )
    with monitor_until_failure(program, 2, tmp_path) as watch:
        assert (watch.failure.cause, watch.failure.ranks) == ("hang", (0,))
        assert watch.failure.detail.endswith("; rank 1 had ended after step 8, with status 0)")
        report = AgentReport("a", "a-1", 0.0, 1, str(tmp_path), str(tmp_path), "a", 1, attempt=0)
        shown = {row[0]: row for row in run_queries._rank_rows(report)}
        assert [shown["1"][i] for i in (2, 3, 5)] == ["ended", "8", ""]
        assert [shown["0"][i] for i in (2, 3)] == ["step", "9"]


@pytest.mark.parametrize("waits", ["", "p.own_page().beat(p.PHASES.index('load'))"])
def test_a_rank_that_hangs_before_its_first_step_is_named(tmp_path: Path, waits: str) -> None:
    """It hangs in an import, or anywhere before it uses ckpt: the other ranks wait for it."""
    program = (
        "import os, time\nif os.environ['RANK'] == '1': time.sleep(1000)\n"
        f"import ckpt.training.heartbeat_page as p\np.own_page().attach_process()\n{waits}\ntime.sleep(1000)"
    )
    with monitor_until_failure(program, 3, tmp_path, start_seconds=20.0) as watch:
        assert (watch.failure.cause, watch.failure.ranks) == ("hang", (1,))
        assert "in phase 'start'" in watch.failure.detail


def test_the_pace_of_a_job_includes_its_saves(tmp_path: Path) -> None:
    """The step to stop after is computed from the pace; a job that saves each step spends most of its time on saves."""
    program = (
        "import ckpt.training.heartbeat_page as p, time\nmine = p.own_page()\nmine.attach_process()\n"
        "step, save = map(p.PHASES.index, ('step', 'save'))\n"
        "for number in range(15):\n    mine.beat(step, number); time.sleep(0.002)\n    mine.beat(save); time.sleep(0.15)\n"
        "mine.beat(step); time.sleep(1000)"
    )
    with monitor_until_failure(program, 2, tmp_path) as watch:
        assert watch.step_seconds > 0.07, "a step without its save takes 0.002 s; a late look misses a part of the first save"


def test_the_time_between_a_first_step_and_its_save_is_not_the_pace_of_a_job(tmp_path: Path) -> None:
    """Otherwise a stop that is requested then lies hundreds of long steps ahead."""
    program = (
        "import ckpt.training.heartbeat_page as p, time\nmine = p.own_page()\nmine.attach_process()\n"
        "step, save = map(p.PHASES.index, ('step', 'save'))\n"
        "mine.beat(step, 0); time.sleep(0.6); mine.beat(save); time.sleep(0.6); mine.beat(step); time.sleep(1000)"
    )
    with monitored(program, 1, tmp_path, HangLimits()) as (watch, polls):
        while watch._heartbeats[0].beats < 3:
            next(polls)
        assert watch.step_seconds >= 1.0


def test_ranks_that_do_not_use_ckpt_may_send_no_heartbeat(tmp_path: Path) -> None:
    """One rank uses ckpt, and continues; the others have no heartbeat page."""
    program = (
        "import os, time\nif os.environ['RANK'] == '1': time.sleep(1000)\n"
        "import ckpt.training.heartbeat_page as p\np.own_page().attach_process()\nwhile True: p.own_page().beat(2, 1); "
        "time.sleep(0.1)"
    )
    with monitored(program, 2, tmp_path, HangLimits(least_seconds=2, initial_limit_seconds=uniform_initial_limits(4))) as (
        watch,
        polls,
    ):
        while watch._heartbeats[0].beats < 80:  # at least eight seconds
            next(polls)
            assert watch.failure is None


SILENT = (
    "import ckpt.training.heartbeat_page as p, time\np.own_page().attach_process(); p.own_page().beat(2, 1)\ntime.sleep(1000)"
)


@pytest.mark.parametrize("gap", [1.0, 1.5, 4.0])
def test_a_hang_is_found_while_each_look_is_late(tmp_path: Path, gap: float) -> None:
    """The run log may answer slowly, so that each look comes more than a second after the one before."""
    with monitored(SILENT, 1, tmp_path, HangLimits(initial_limit_seconds=uniform_initial_limits(5))) as (watch, polls):
        while watch._heartbeats[0].step != 1:
            next(polls)
        now = time.monotonic()
        for looks in range(1, 12):
            watch.poll(now + looks * gap)
            if watch.failure is not None:
                break
        assert watch.failure is not None
        assert watch.failure.cause == "hang"
        assert looks >= 5, "of each gap a second counts"


def test_a_pause_of_the_whole_host_is_no_hang(tmp_path: Path) -> None:
    with monitored(SILENT, 1, tmp_path, HangLimits(initial_limit_seconds=uniform_initial_limits(5))) as (watch, polls):
        while watch._heartbeats[0].step != 1:
            next(polls)
        now = time.monotonic()
        watch.poll(now + 1000.0)
        for looks in range(6):
            watch.poll(now + 1000.0 + looks / 2)
        assert watch.failure is None, "four seconds, and a pause"
        for looks in range(6, 12):
            watch.poll(now + 1000.0 + looks / 2)
        assert watch.failure is not None


def test_a_stopped_rank_is_found_while_each_look_is_late(tmp_path: Path) -> None:
    """A suspended job is not taken for a stopped rank, although its agent may run before its ranks do."""
    with monitored(SILENT, 1, tmp_path, HangLimits()) as (watch, polls):
        while watch._heartbeats[0].step != 1:
            next(polls)
        stop(watch.ranks[0].pid)
        while processes.process_state(watch.ranks[0].pid) != "T":
            time.sleep(0.01)
        now = time.monotonic() + 1.0
        for at in (0.0, 1000.0, 1000.05, 1000.1):
            watch.poll(now + at)
            assert watch.failure is None
        for looks in range(1, 5):
            watch.poll(now + 1000.0 + 1.5 * looks)
        assert watch.failure is not None
        assert watch.failure.cause == "stopped"


def test_steps_are_learned_while_each_look_is_late(tmp_path: Path) -> None:
    program = (
        "import ckpt.training.heartbeat_page as p, time\np.own_page().attach_process()\n"
        "for step in range(10 ** 6):\n    p.own_page().beat(2, step); time.sleep(0.05)"
    )
    limits = HangLimits(least_seconds=2)
    with monitored(program, 1, tmp_path, limits) as (watch, polls):
        while watch._heartbeats[0].step < 1:
            next(polls)
        for _ in range(9):
            time.sleep(1.1)
            next(polls)
    assert limits.limit_seconds("step") < limits.initial_limit_seconds["step"]


def test_a_rank_that_waits_after_its_save_is_not_blamed(tmp_path: Path) -> None:
    """Two ranks are at the same step: one that has just saved, for which no limit applies and which is silent for longest; and
    one that hangs."""
    program = (
        "import ckpt.training.heartbeat_page as p, os, time\nrank = int(os.environ['RANK'])\np.own_page().attach_process()\n"
        "rank and time.sleep(1)\np.own_page().beat(p.PHASES.index('step' if rank else 'end'), 9)\ntime.sleep(1000)"
    )
    with monitor_until_failure(program, 2, tmp_path) as watch:
        assert (watch.failure.cause, watch.failure.ranks) == ("hang", (1,))
        assert "in phase 'step'" in watch.failure.detail


def test_steps_of_different_lengths_are_no_hang(start: Callable[..., Run]) -> None:
    """They make no rank a straggler, either."""
    run = start("--hang", "1", "--straggler-after", "0.4", seconds=0.02, fault=("jitter", 0, 0))
    assert run.end() == 0, run.messages
    assert_result(run)
    assert run.failures() == []
    assert run.messages == ""


@pytest.mark.parametrize("phase", ["save", "eval"])
def test_a_hang_outside_of_steps_is_detected(start: Callable[..., Run], phase: str) -> None:
    run = start("--hang", "3", "--first-hang", "8", fault=(f"hung-{phase}", 22, 2))
    assert run.end() == 0, run.messages
    assert_result(run)
    assert run.failures() == [("hang", [2])]
    assert f"in phase '{phase}'" in run.messages
