"""ckpt-run notices that a job hangs, and names the rank."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.runs import Run, is_right
from helpers.runs import start as start

from ckpt.recovery.policy.hang_limits import HangLimits, uniform_initial_limits
from ckpt.recovery.ranks.launch import LaunchSpec
from ckpt.recovery.ranks.launch import start as start_ranks
from ckpt.recovery.ranks.launch import stop as stop_ranks
from ckpt.recovery.ranks.rank_monitor import RankMonitor
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.tools import run_queries


@pytest.mark.parametrize("fault", ["loop", "dead-lock"])
def test_a_rank_hangs(start: Callable[..., Run], fault: str) -> None:
    """The stacks of it are kept, which show where."""
    run = start("--hang", "2", fault=(fault, 17, 2))
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == [("hang", [2])]
    assert "sent no heartbeat for" in run.said
    kept = "".join(p.read_text() for p in (run.files / "logs" / "0").iterdir() if p.name.startswith("rank-2"))
    assert "job.py" in kept
    assert "main" in kept


def test_a_py_spy_that_may_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the rank writes its stacks itself."""
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\necho 'Error: Permission Denied'; exit 1")
    spy.chmod(0o755)
    program = (
        "import ckpt.training.heartbeat_page as p, time\np.own_page().beat(2, 7)\n"
        "def waits_for_ever():\n    open('begun', 'w').close(); time.sleep(1000)\nwaits_for_ever()"
    )
    share = LaunchSpec("r", 0, 0, 1, 1, 0, "127.0.0.1", 1, {})
    (tmp_path / "pages").mkdir()
    here = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), sys.executable, "-c", program]
    ranks = start_ranks(here, share, tmp_path / "pages", tmp_path / "logs")
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < until, ranks[0].log.read_text()
            time.sleep(0.01)
        watch = RankMonitor(ranks, HangLimits(), -1)
        watch.poll(time.monotonic())
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # py-spy is looked for beside it
        watch.save_stacks()
        assert "Permission Denied" in (tmp_path / "logs" / "rank-0.stacks").read_text()
        while "waits_for_ever" not in ranks[0].log.read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        stop_ranks(ranks, "")


@contextlib.contextmanager
def looked_after(program: str, size: int, folder: Path, limits: HangLimits) -> Iterator[tuple[RankMonitor, Iterator[None]]]:
    """Ranks that run a program; each turn of the iterator looks at them, for a minute at most."""
    share = LaunchSpec("r", 0, 0, size, size, 0, "127.0.0.1", 1, {})
    ranks = start_ranks([sys.executable, "-c", program], share, folder, folder / "logs")
    watch, until = RankMonitor(ranks, limits, -1), time.monotonic() + 60

    def looks() -> Iterator[None]:
        while True:
            assert time.monotonic() < until
            watch.poll(time.monotonic())
            yield
            time.sleep(0.01)

    try:
        yield watch, looks()
    finally:
        stop_ranks(ranks, "")


@contextlib.contextmanager
def watched(program: str, size: int, folder: Path) -> Iterator[RankMonitor]:
    """Ranks that run a program, until something is wrong with them."""
    with looked_after(
        program, size, folder, HangLimits(least_seconds=0.5, initial_limit_seconds=uniform_initial_limits(5))
    ) as (watch, looks):
        while watch.failure is None:
            next(looks)
        yield watch


@pytest.mark.parametrize(("step", "more", "blamed", "said"), [
    (8, "", 0, "; rank 1 had closed its Checkpointer after step 8)"),
    (7, "print('Traceback:\\nValueError: bad batch', flush=True)", 1, "; its log ends with: ValueError: bad batch)"),
])  # fmt: skip
def test_a_rank_that_has_closed_its_checkpointer_is_named(tmp_path: Path, step: int, more: str, blamed: int, said: str) -> None:
    """As one that an exception has taken out of its loop, and whose process goes on: other threads, or a collective at its end,
    keep it. The others wait for it in a step; where it is behind them it is the cause."""
    program = (
        "import ckpt.training.heartbeat_page as p, os, time\nrank = int(os.environ['RANK'])\n"
        f"p.own_page().attach_process(); p.own_page().beat(2, {step} if rank else 8)\n"
        f"if rank: p.own_page().beat(6); {more}\ntime.sleep(1000)"
    )
    with watched(program, 2, tmp_path) as watch:
        assert (watch.failure.cause, watch.failure.ranks) == ("hang", (blamed,))
        assert watch.failure.detail.endswith(said)


def test_a_hang_after_a_rank_has_ended_names_it(tmp_path: Path) -> None:
    """It has ended well, so that it is not what has failed; but perhaps it is waited for."""
    program = (
        "import ckpt.training.heartbeat_page as p, os, time\nrank = int(os.environ['RANK'])\n"
        "p.own_page().attach_process(); p.own_page().beat(2, 9 - rank)\nrank or time.sleep(1000)"
    )
    with watched(program, 2, tmp_path) as watch:
        assert (watch.failure.cause, watch.failure.ranks) == ("hang", (0,))
        assert watch.failure.detail.endswith("; rank 1 had ended after step 8, with status 0)")
        said = AgentReport("a", "a-1", 0.0, 1, str(tmp_path), str(tmp_path), "a", 1, attempt=0)
        shown = {row[0]: row for row in run_queries._rank_rows(said)}
        assert [shown["1"][i] for i in (2, 3, 5)] == ["ended", "8", ""]
        assert [shown["0"][i] for i in (2, 3)] == ["step", "9"]


@pytest.mark.parametrize("waits", ["", "p.own_page().beat(p.PHASES.index('load'))"])
def test_a_hang_before_the_first_step(tmp_path: Path, waits: str) -> None:
    """One hangs while it imports, or wherever it is before it uses ckpt: the others wait for it, and it is named."""
    program = (
        "import os, time\nif os.environ['RANK'] == '1': time.sleep(1000)\n"
        f"import ckpt.training.heartbeat_page as p\np.own_page().attach_process()\n{waits}\ntime.sleep(1000)"
    )
    with watched(program, 3, tmp_path) as watch:
        assert (watch.failure.cause, watch.failure.ranks) == ("hang", (1,))
        assert "in phase 'start'" in watch.failure.detail


def test_the_pace_of_a_job_has_its_saves_in_it(tmp_path: Path) -> None:
    """By it the step to stop after is named: of a job that saves each step most of the time is that of the saves."""
    program = (
        "import ckpt.training.heartbeat_page as p, time\nmine = p.own_page()\nmine.attach_process()\n"
        "step, save = map(p.PHASES.index, ('step', 'save'))\n"
        "for number in range(15):\n    mine.beat(step, number); time.sleep(0.002)\n    mine.beat(save); time.sleep(0.15)\n"
        "mine.beat(step); time.sleep(1000)"
    )
    with watched(program, 2, tmp_path) as watch:
        assert watch.step_seconds >= 0.14


def test_ranks_that_know_nothing_of_ckpt_may_be_silent(tmp_path: Path) -> None:
    """One of them uses it, and goes on; of the others nothing is known."""
    program = (
        "import os, time\nif os.environ['RANK'] == '1': time.sleep(1000)\n"
        "import ckpt.training.heartbeat_page as p\np.own_page().attach_process()\nwhile True: p.own_page().beat(2, 1); "
        "time.sleep(0.1)"
    )
    with looked_after(program, 2, tmp_path, HangLimits(least_seconds=2, initial_limit_seconds=uniform_initial_limits(4))) as (
        watch,
        looks,
    ):
        while watch._heartbeats[0].beats < 80:  # eight seconds at least
            next(looks)
            assert watch.failure is None


def test_a_rank_that_may_wait_is_not_blamed(tmp_path: Path) -> None:
    """At one step are one that has saved last, for which no limit holds, and is silent for longest; and one that hangs."""
    program = (
        "import ckpt.training.heartbeat_page as p, os, time\nrank = int(os.environ['RANK'])\np.own_page().attach_process()\n"
        "rank and time.sleep(1)\np.own_page().beat(p.PHASES.index('step' if rank else 'end'), 9)\ntime.sleep(1000)"
    )
    with watched(program, 2, tmp_path) as watch:
        assert (watch.failure.cause, watch.failure.ranks) == ("hang", (1,))
        assert "in phase 'step'" in watch.failure.detail


def test_steps_of_different_length_are_no_hang(start: Callable[..., Run]) -> None:
    """And no rank is a straggler for them."""
    run = start("--hang", "1", "--straggler-after", "0.4", seconds=0.02, fault=("jitter", 0, 0))
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == []
    assert run.said == ""


@pytest.mark.parametrize("phase", ["save", "eval"])
def test_a_hang_that_is_no_step(start: Callable[..., Run], phase: str) -> None:
    run = start("--hang", "3", "--first-hang", "8", fault=(f"hung-{phase}", 22, 2))
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == [("hang", [2])]
    assert f"in phase '{phase}'" in run.said
