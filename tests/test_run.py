"""ckpt-run: a job that is killed, stopped, hung and asked to end comes back by itself, and ends as if nothing had been."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Literal

import click
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SOAK

import ckpt
from ckpt.recovery.agent import agent
from ckpt.recovery.agent.host_options import HostOptions
from ckpt.recovery.goodput.ledger import total_seconds_by_category
from ckpt.recovery.memory_tier import local
from ckpt.recovery.policy.decide import MAX_REPEATED_FAILURES, Budget, Failure, decide
from ckpt.recovery.policy.hang_limits import INITIAL_LIMIT_SECONDS, HangLimits, uniform_initial_limits
from ckpt.recovery.ranks import launch, processes
from ckpt.recovery.ranks.host_identity import host_address, launcher_hint
from ckpt.recovery.ranks.launch import LaunchSpec, free_port
from ckpt.recovery.ranks.launch import start as start_ranks
from ckpt.recovery.ranks.launch import stop as stop_ranks
from ckpt.recovery.ranks.rank_monitor import RankMonitor
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.http_pages import HttpPage, HttpPages
from ckpt.tools import run_queries
from ckpt.tools.common import Number
from ckpt.tools.run import command as run_command
from ckpt.tools.simulate import command as simulate
from ckpt.training.heartbeat_page import PHASES, HeartbeatPage

PROGRAM = str(Path(__file__).parent / "run_program.py")

RANKS = 3


class Run:
    """A job under ckpt-run, as a user starts it."""

    def __init__(
        self, folder: Path, *options: str, steps: int = 40, seconds: float = 0.02, fault: tuple[object, ...] = ()
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.files = folder / "run"
        command = [sys.executable, "-m", "ckpt.tools.run", "-n", str(RANKS), "--run-dir", str(self.files), "--cold"]
        command += [*options, "--"]
        program = [sys.executable, PROGRAM, str(folder), str(steps), str(seconds), *map(str, fault)]
        self.process = subprocess.Popen([*command, *program], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def end(self, timeout: float = 120) -> int:
        _, self.said = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def until_step(self, step: int, attempt: int = 0) -> None:
        """Until all ranks have done it."""
        until = time.monotonic() + 60
        pages: list[Path] = []
        while time.monotonic() < until:
            if not pages:  # a command each time, which takes as long as some steps
                pages = [Path(e["facts"]["pages"]) for e in self.record() if e["kind"] == "start" and e["attempt"] == attempt]
            try:
                if pages and all(HeartbeatPage(pages[0] / f"{attempt}-{i}").read().step >= step for i in range(RANKS)):
                    return
            except FileNotFoundError:
                pass
            time.sleep(0.01)
        raise AssertionError(f"step {step} was not reached")

    def record(self) -> list[dict]:  # type: ignore[type-arg]
        done = subprocess.run(
            [sys.executable, "-m", "ckpt.tools.run", "why", "--json", "--run-dir", str(self.files)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return [json.loads(line) for line in done.stdout.splitlines()]

    def failures(self) -> list[tuple[str, list[int]]]:
        return [(e["facts"]["cause"], e["facts"]["ranks"]) for e in self.record() if e["kind"] == "failure"]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def begin(*options: str, **arguments: object) -> Run:
        made.append(Run(tmp_path / "job", *options, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for run in made:
        run.close()


def expected(steps: int) -> list[np.ndarray]:
    """What the job must come to: the same sums in the same order, bit for bit."""
    found = []
    for rank in range(RANKS):
        w = np.zeros((4, 100))
        for step in range(steps):
            w += np.sin(step * 1.7 + rank)
        found.append(w)
    return found


def is_right(run: Run, steps: int = 40) -> None:
    for rank, want in enumerate(expected(steps)):
        assert np.array_equal(np.load(run.folder / f"end-{rank}.npy"), want)


def kill_all(run: Run) -> None:
    """At once, or nearly: ckpt-run may have ended some of them for the first."""
    for pid in [run.pid(rank) for rank in range(RANKS)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def none_left(pids: list[int]) -> bool:
    until = time.monotonic() + 20
    while any(processes.process_state(pid) not in ("", "Z") for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


# --- whole jobs ------------------------------------------------------------------------------------------------


def test_a_quiet_run(start: Callable[..., Run]) -> None:
    run = start()
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == []
    assert run.said == ""


KILLS = list(product(range(RANKS), [signal.SIGKILL, signal.SIGSEGV])) if SOAK else [(0, signal.SIGKILL), (2, signal.SIGSEGV)]


@pytest.mark.soak
@pytest.mark.parametrize(("rank", "number"), KILLS)
def test_a_rank_is_killed(start: Callable[..., Run], rank: int, number: signal.Signals) -> None:
    run = start(steps=100)
    run.until_step(12)
    os.kill(run.pid(rank), number)
    assert run.end() == 0, run.said
    is_right(run, 100)
    assert run.failures() == [("signal", [rank])]
    killed = rf"rank {rank} was killed by {number.name} after step \d+"
    assert re.search(rf"{killed}; all ranks start again from step \d+, or a newer one", run.said)


def test_a_warm_start(start: Callable[..., Run]) -> None:
    """The ranks are forked from a process that has imported what they import."""
    run = start("--warm", steps=600)
    command = [sys.executable, "-m", "ckpt.tools.run", "status", "--run-dir", str(run.files)]
    until = time.monotonic() + 60
    while "the next start is warm" not in subprocess.run(command, capture_output=True, text=True, check=False).stdout:
        assert time.monotonic() < until
    os.kill(run.pid(1), signal.SIGKILL)
    run.until_step(1, attempt=1)
    assert b"fork_server.py" in Path(f"/proc/{run.pid(1)}/cmdline").read_bytes()
    assert run.end() == 0, run.said
    is_right(run, 600)
    assert run.failures() == [("signal", [1])]


def test_all_ranks_are_killed_twice(start: Callable[..., Run]) -> None:
    run = start(seconds=0.05)
    for attempt, step in enumerate([12, 22]):
        run.until_step(step, attempt)
        kill_all(run)
    assert run.end() == 0, run.said
    is_right(run)
    assert len(run.failures()) == 2


def test_a_rank_is_stopped(start: Callable[..., Run]) -> None:
    run = start(seconds=0.03)
    run.until_step(12)
    os.kill(run.pid(1), signal.SIGSTOP)
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == [("stopped", [1])]


@pytest.mark.parametrize("fault", ["loop", "dead-lock"])
def test_a_rank_hangs(start: Callable[..., Run], fault: str) -> None:
    """The stacks of it are kept, which show where."""
    run = start("--hang", "2", fault=(fault, 17, 2))
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == [("hang", [2])]
    assert "said nothing for" in run.said
    kept = "".join(p.read_text() for p in (run.files / "logs" / "0").iterdir() if p.name.startswith("rank-2"))
    assert "run_program.py" in kept
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


@pytest.mark.parametrize(
    ("fault", "detail"), [("raise", r"exited with status 1 \(RuntimeError: a bad batch\)"), ("exit", "status 7")]
)
def test_a_rank_fails(start: Callable[..., Run], fault: str, detail: str) -> None:
    run = start(fault=(fault, 17, 1))
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == [("exit", [1])]
    assert re.search(detail, run.said)


def test_a_rank_leaves_the_others(start: Callable[..., Run]) -> None:
    """With status 0, which is no failure by itself. Those that wait for its part of a save are told at once, and say it."""
    run = start(fault=("leave", 17, 1))
    assert run.end() == 0, run.said
    is_right(run)
    assert "rank 1 of 3 did not bring its part of step 19 and has ended" in run.said, run.said
    assert len(run.failures()) == 1


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


def test_a_loss_that_is_not_finite_once(start: Callable[..., Run]) -> None:
    """It may have been the hardware: the same is tried again, and comes out right."""
    run = start(fault=("nan", 17, 1))
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == [("diverged", [1])]
    assert "the loss of step 17 was nan; the same batches are tried again" in run.said


def test_a_loss_that_is_never_finite(start: Callable[..., Run]) -> None:
    """At the second time the batch is passed over, and an older step taken."""
    run = start(fault=("poison", 17, 1))
    assert run.end() == 0, run.said
    assert run.failures() == [("diverged", [1])] * 2
    assert "the loss of step 17 was nan; the 2nd time there: batches 16 to 17 are passed over" in run.said
    told = [e["facts"]["environment"] for e in run.record() if e["kind"] == "start"]
    assert [each.get("CKPT_SKIP") for each in told] == [None, None, "16-17"]


def test_a_job_that_always_fails(start: Callable[..., Run]) -> None:
    """It is given up, with the reason, and does not go on for ever."""
    run = start(fault=("always", 0, 0))
    assert run.end() == 1
    assert len(run.failures()) == MAX_REPEATED_FAILURES
    look = f"look at {run.files}/logs/2/rank-0.log"
    assert run.said.strip().endswith(f"times in a row, at the same place, with no newer step saved: {look}")
    assert "RuntimeError: there is no data" in run.said
    command = [sys.executable, "-m", "ckpt.tools.run", "why", "--run-dir", str(run.files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "halt: rank 0 exited with status 1 (RuntimeError: there is no data) before the first step" in done.stdout


ROTTEN = """
import ckpt, numpy as np, os
attempt = int(os.environ["CKPT_ATTEMPT"])
with ckpt.Checkpointer("repo", every=5, keep=5) as ck:
    state, start = ck.restore({"a": np.zeros(3)})
    with open("restored", "a") as file:
        print(start - 1, file=file)
    for step in range(start, 50):
        state["a"] += 1
        if step == SPOILED and attempt == 0:
            state["a"][:] = -1e9
        if state["a"][0] < 0 and step == PLACE:
            raise RuntimeError("spoiled")
        ck.step(step, state)
        ck.wait()
np.save("end.npy", state["a"])
"""


@pytest.mark.parametrize(("spoiled", "place", "varies", "restored"), [
    (9, 10, 4, "-1 9 9 4"), (22, 31, 3, "-1 29 29 24 24 19"), (22, 31, 1, "-1 29 29 24 19"),
])  # fmt: skip
def test_steps_that_are_whole_and_rotten(tmp_path: Path, spoiled: int, place: int, varies: int, restored: str) -> None:
    """They make the job fail a few steps later, always there or each time elsewhere: after two of these an older one is taken,
    and one before that, where that was rotten, too."""
    rotten = ROTTEN.replace("SPOILED", str(spoiled)).replace("PLACE", f"{place} + attempt % {varies}")
    command = [sys.executable, "-m", "ckpt.tools.run", "--cold", "--run-dir", "run", "--", sys.executable, "-c", rotten]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "restored").read_text().split() == restored.split()
    newest = restored.split()[1]
    assert f"from a step before {newest}, which may be the reason: it failed twice soon after it" in done.stderr
    assert np.load(tmp_path / "end.npy").tolist() == [50.0] * 3


def test_steps_of_different_length_are_no_hang(start: Callable[..., Run]) -> None:
    """And no rank is a straggler for them."""
    run = start("--hang", "1", "--straggler-after", "0.4", seconds=0.02, fault=("jitter", 0, 0))
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == []
    assert run.said == ""


@pytest.mark.parametrize("storm", [1, 3])
def test_it_is_asked_to_end(start: Callable[..., Run], storm: int) -> None:
    """Saved at a step that was under way; started again it goes on from there, and no step was lost."""
    run = start()
    run.until_step(13)
    run.process.send_signal(signal.SIGTERM)
    if storm > 1:  # whoever asks again does not wait
        for _ in range(storm):
            time.sleep(0.01)
            run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.said
    steps = ckpt.open(run.folder / "repo").steps()
    assert steps[-1] >= (13 if storm == 1 else 9)
    assert storm > 1 or "have saved and ended, as SIGTERM asked" in run.said
    again = start()
    assert again.end() == 0, again.said
    is_right(again)
    assert [e["attempt"] for e in again.record() if e["kind"] == "start"] == [0, 1]


def test_it_was_all_that_stood_still(start: Callable[..., Run]) -> None:
    """A host that is frozen and thawed, ckpt-run and ranks together: nobody has hung."""
    run = start("--hang", "2", "--cold")
    run.until_step(12)
    pids = [run.process.pid, *(run.pid(rank) for rank in range(RANKS))]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for pid in pids:  # ckpt-run first: it looks before they have said anything
        os.kill(pid, signal.SIGCONT)
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == []


def test_ranks_that_do_not_use_ckpt_are_asked_too(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'saved').write_text('yes'), sys.exit(0)))\n"
        "(folder / 'ready').touch()\n"
        "time.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), "--", sys.executable, str(program)]
    run = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "saved").read_text() == "yes"
    assert "rank 0 was ended by SIGTERM, with no Checkpointer opened, before the first step" in said


def test_a_console_that_is_full_and_nohup(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), "--"]
    program = ["sh", "-c", "echo much; sleep 1; touch $0", str(tmp_path / "done")]
    with open("/dev/full", "wb") as full:
        run = subprocess.Popen([*command, *program], stdout=full, stderr=full)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("run/logs/0/rank-0.log")):
        assert time.monotonic() < until
        time.sleep(0.02)
    run.send_signal(signal.SIGHUP)
    assert run.wait(60) == 0
    assert (tmp_path / "done").exists()


def test_nothing_is_left_running(start: Callable[..., Run]) -> None:
    """Not even where ckpt-run itself is killed, and a rank has children of its own."""
    run = start(steps=10_000, fault=("child", 0, 1))
    run.until_step(3)
    pids = [run.pid(rank) for rank in range(RANKS)] + [int((run.folder / "child").read_text())]
    assert all(processes.process_state(pid) for pid in pids)
    run.process.kill()
    run.process.wait()
    assert none_left(pids)
    again = start(steps=40)
    assert again.end() == 0, again.said
    assert sum(processes.process_state(pid) not in ("", "Z") for pid in pids) == 0


def test_the_guardian_is_killed_and_then_ckpt_run(start: Callable[..., Run]) -> None:
    """Another has taken its place, and ends what the ranks have started."""
    run = start(steps=10_000, fault=("child", 0, 1))
    run.until_step(12)
    (pages,) = [Path(e["facts"]["pages"]) for e in run.record() if e["kind"] == "start"]

    def guardians() -> list[int]:
        words = [b"ckpt.recovery.ranks.orphan_guard", os.fsencode(pages)]
        found = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if has(p, words)]
        return [pid for pid in found if processes.process_state(pid) not in ("", "Z")]

    (first,) = guardians()
    os.kill(first, signal.SIGKILL)
    until = time.monotonic() + 60
    while first in guardians() or not guardians():
        assert time.monotonic() < until
        time.sleep(0.01)
    pids = [*(run.pid(rank) for rank in range(RANKS)), int((run.folder / "child").read_text())]
    run.close()
    assert none_left(pids)
    while pages.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def has(file: Path, words: list[bytes]) -> bool:
    """Whether a command line names all of them."""
    with contextlib.suppress(OSError):
        return set(words) <= set(file.read_bytes().split(b"\0"))
    return False


def test_children_of_a_killed_rank_end_with_it(start: Callable[..., Run]) -> None:
    run = start(fault=("child", 0, 1))
    run.until_step(3)
    child = int((run.folder / "child").read_text())
    os.kill(run.pid(0), signal.SIGKILL)
    run.until_step(8, attempt=1)
    assert processes.process_state(child) in ("", "Z")
    assert run.end() == 0, run.said
    is_right(run)


def test_the_time_is_accounted_for(start: Callable[..., Run]) -> None:
    began = time.monotonic()
    run = start()
    run.until_step(12)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.end() == 0
    wall = time.monotonic() - began
    seconds = total_seconds_by_category(run.files)
    assert 0 < sum(seconds.values()) <= wall
    assert seconds["useful"] > 0
    assert seconds["spawn"] > 0
    assert {"restore", "stop"} <= set(seconds)  # and redo, unless the last step was just saved
    command = [sys.executable, "-m", "ckpt.tools.run", "report", "--run-dir", str(run.files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 failure" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--", "/none/such"], 1, "/none/such can't be started: No such file or directory"),
        (["whyy"], 1, "there is no command whyy; did you mean `ckpt-run why`?"),
        (["-n", "0", "--", "true"], 2, "is not in the range"),
        ([], 2, "Missing argument"),
        (["--spares", "1", "--", "true"], 1, "--spares 1 needs --nnodes 2 or more"),
        (["--min", "2", "--", "true"], 1, "--min 2 is more than the 1 host of --nnodes"),
        (["--straggler", "1", "--", "true"], 2, "is not in the range"),
        (["--dir", "nowhere://x", "--", "true"], 1, '(pip install "ckpt-store[s3]"), or another scheme of fsspec\n'),
        (["--dir", "/proc/none", "--", "true"], 1, "--dir can't be used: "),
        (["--dir", str(Path(__file__).parent), "--", "true"], 1, "is not a checkpoint repository; name an empty or a new"),
        (["--dir", __file__, "--", "true"], 1, f"{__file__}/ckpt.json failed: Not a directory; a part of this path is a file"),
        (["--dir", "", "--", "true"], 1, "--dir is empty"),
        (["--", ""], 1, "the command is empty"),
        (["--address", "192.0.2.1", "--", "true"], 1, "give one of this host as --address"),
        (["--metrics", "127.0.0.1:99999", "--", "true"], 1, "write HOST:PORT, such as 127.0.0.1:9200"),
        (["--metrics", f"{'ü' * 70}.b:80", "--", "true"], 1, ".b:80: write HOST:PORT, such as 127.0.0.1:9200"),
        (["--launcher", "torchrun", "--", "true"], 1, "GROUP_RANK='x' is no number of a host"),
        (["--launcher", "torchrun", "--name", "a", "--", "true"], 1, "GROUP_WORLD_SIZE is not set here, so torchrun has not"),
        (["--launcher", "slurm", "--", "true"], 1, "start it as `srun … ckpt-run --launcher slurm …`, or leave out --launcher"),
        (["--launcher", "k8s", "--", "true"], 1, "each would run a job of its own; give --nnodes, without the spares"),
        (["--nnodes", "2", "--name", "a/b", "--", "true"], 1, "'a/b' can't be the name of a host: give letters"),
        (["--state", "sqlite:///x", "--", "true"], 1, "--state sqlite:///x: write etcd://HOST:PORT,…/NAME"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], status: int, message: str) -> None:
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), *arguments]
    environ = os.environ | {"GROUP_RANK": "x"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert status != 1 or len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("run/logs/0/rank-0.log"))
    no_memory_is_left(tmp_path / "run")


def test_what_is_no_number() -> None:
    for option in ("grace", "patience", "give-up", "hang", "first-hang", "spike", "straggler", "straggler-after"):
        with pytest.raises(click.BadParameter, match="nan can't be used here"):
            run_command.main([f"--{option}", "nan", "--", "true"], standalone_mode=False)


def test_numbers_of_options() -> None:
    for text in ("nan", "inf", "-1", "x", ""):
        with pytest.raises(click.BadParameter):
            Number(0).convert(text, None, None)
    assert Number(0, never=True).convert("inf", None, None) == math.inf
    assert Number(0).convert("2.5", None, None) == 2.5
    with pytest.raises(click.BadParameter, match="nan is no number"):
        simulate.main(["--days", "nan"], standalone_mode=False)


def test_an_address_of_another_host_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_shared_memory_folder", lambda: str(tmp_path))
    with contextlib.closing(SqliteRunLog(tmp_path)) as record:
        with pytest.raises(CkptError, match="give one of this host as --address"):
            agent.Agent(RunSpec(("true",), 1), HostOptions("a", tmp_path, "192.0.2.1"), record, print)
        assert not list(tmp_path.glob("ckpt-run-*"))


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt.tools.run", "-n", "2", "--run-dir", str(tmp_path / "run"), "--"]
    done = subprocess.run([*command, "python", "-u", "nosuch.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    said = "ckpt-run: python -u nosuch.py can't be started: there is no nosuch.py here; give the path of the script\n"
    assert done.stderr == said
    assert not (tmp_path / "run").exists(), "no run was begun"


@pytest.mark.parametrize("url", ["nowhere://x", "of-others"])
def test_a_program_with_a_url_that_cannot_be_used(tmp_path: Path, url: str) -> None:
    """It is told once: another start would come to the same."""
    (tmp_path / "of-others").mkdir()
    (tmp_path / "of-others" / "file").touch()
    program = [sys.executable, "-c", f"import ckpt; ckpt.Checkpointer({url!r})"]
    command = [sys.executable, "-m", "ckpt.tools.run", "-n", "2", "--run-dir", str(tmp_path / "run"), "--", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert url in line
    why, _, log = line.partition("; look at ")
    assert why.endswith("before the first step; another start would not change that")
    assert url in Path(log).read_text()


def test_a_program_that_names_no_url(tmp_path: Path) -> None:
    """--dir names it; without, that is said."""
    program = "import ckpt; ckpt.save({'a': 1}, step=3); ckpt.Checkpointer().close(); assert ckpt.load() == {'a': 1}"
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", "run"]
    for more, status in ((["--dir", "kept"], 0), ([], 1)):
        done = subprocess.run(
            [*command, *more, "--", sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False,
            cwd=tmp_path, env={name: value for name, value in os.environ.items() if name != "CKPT_DIR"},
        )  # fmt: skip
        assert done.returncode == status, done.stderr
    assert ckpt.open(tmp_path / "kept").steps() == [3]
    assert "no repository is named: give its URL, or start this by `ckpt-run --dir URL` (CKPT_DIR)" in done.stderr


def test_the_next_attempt_starts_where_memory_has_run_short(tmp_path: Path) -> None:
    """By somebody else, since the first had begun: it has the room of the pages of that."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    pages = tmp_path / "pages"
    pages.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(pages)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        for attempt in range(3):
            share = LaunchSpec("r", attempt, 0, 2, 2, 0, "127.0.0.1", 1, {})
            ranks = start_ranks(["true"], share, pages, tmp_path / "logs")
            stop_ranks(ranks, "")
            with contextlib.suppress(OSError), open(pages / "others", "ab", buffering=0) as other:
                while True:
                    other.write(bytes(4096))
        assert sorted(page.name for page in pages.iterdir()) == ["2-0", "2-1", "others"]
    finally:
        subprocess.run(["umount", str(pages)], check=True)


def test_a_rank_keeps_its_number_until_its_session_is_ended(tmp_path: Path) -> None:
    """Else another process might have it, and be ended for it."""
    share = LaunchSpec("r", 0, 0, 1, 1, 0, "127.0.0.1", 1, {})
    command = ["sh", "-c", "sleep 1000 & echo $! > $0; exit 3", str(tmp_path / "child")]
    (rank,) = start_ranks(command, share, tmp_path, tmp_path / "logs")
    until = time.monotonic() + 30
    while not rank.has_ended():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert rank.status == 3
    assert processes.process_state(rank.process.pid) == "Z"
    child = int((tmp_path / "child").read_text())
    assert processes.process_state(child) not in ("", "Z")
    stop_ranks([rank], "")
    assert processes.process_state(rank.process.pid) == ""
    assert none_left([child])


def test_the_port_of_a_job_is_none_that_a_connection_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives those of its own range to who connects, at any moment before rank 0 listens."""
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port("127.0.0.1") for _ in range(50)}
    assert len(found) > 40
    assert max(found) < least
    monkeypatch.setattr(launch, "_first_ephemeral_port", lambda: 2000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [port])
        assert free_port("127.0.0.1") not in (0, port)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_addresses_of_version_6() -> None:
    assert host_address("etcd://[::1]:2379/lab") == "::1"
    with socket.socket(socket.AF_INET6) as free:
        free.bind(("::1", free_port("::1")))
    web = HttpPages("::1", 0, {"/": lambda: HttpPage(b"here")}, "test")
    try:
        assert urllib.request.urlopen(f"http://[::1]:{web.port}/").read() == b"here"
    finally:
        web.close()


def test_spares_are_among_the_hosts_of_a_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), "--spares", "1"]
    environ = os.environ | {"SLURM_STEP_NUM_NODES": "3"}
    command += ["--launcher", "slurm", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert "2 hosts share no file that could hold the state of the run" in done.stderr


def test_two_in_one_folder(start: Callable[..., Run]) -> None:
    run = start(steps=10_000)
    run.until_step(1)
    again = start()
    assert again.end() == 1
    assert "another ckpt-run works in" in again.said
    assert len(again.said.splitlines()) == 1
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT


@pytest.mark.parametrize("what", ["why", "status", "report", "plan --dry-run", "drain", "inject kill"])
@pytest.mark.parametrize("there", [False, True])
def test_no_run_here(tmp_path: Path, what: str, there: bool) -> None:
    if there:
        (tmp_path / "none").mkdir()
    command = [sys.executable, "-m", "ckpt.tools.run", *what.split(), "--run-dir", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"there is no run in {tmp_path / 'none'}; give its folder as --run-dir" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["none"] * there, "nothing is made there"
    if there:
        (tmp_path / "none" / "ledger-h1.jsonl").touch()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "has only the ledger of a host; also give the --state of the run" in done.stderr


def test_plain_commands(tmp_path: Path) -> None:
    """Ranks that know nothing of ckpt are run, too."""
    command = [sys.executable, "-m", "ckpt.tools.run", "-n", "2", "--show", "all", "--run-dir", str(tmp_path / "run")]
    command += ["--", "sh", "-c", "echo I am $RANK of $WORLD_SIZE"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["I am 0 of 2", "I am 1 of 2"]
    no_memory_is_left(tmp_path / "run")


def test_another_job_in_a_folder_is_told_of_the_one_before(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), "--"]
    said = []
    for program in (["true"], ["true"], ["sh", "-c", "true"]):
        done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0
        said.append(done.stderr)
    assert said[:2] == ["", ""]
    (line,) = said[2].splitlines()
    assert "another job was run there (true)" in line


@pytest.mark.parametrize(("launcher", "command", "better"), [
    ("local", "/usr/bin/mpirun", "`ckpt-run -n RANKS --launcher mpiexec -- PROGRAM`"),
    ("local", "srun", "`srun … ckpt-run --launcher slurm -- PROGRAM`"),
    ("slurm", "srun", ""), ("local", "python", ""),
])  # fmt: skip
def test_a_command_that_starts_ranks(launcher: str, command: str, better: str) -> None:
    said = launcher_hint(launcher, [command, "-n", "3"])
    assert better in said
    assert bool(said) == bool(better)


# --- a tier in memory ------------------------------------------------------------------------------------------


@pytest.fixture
def tiered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TEST_TIER", "1")


def in_memory(run: Run) -> Path:
    found = local.memory_folder(run.files)
    if found is None:
        pytest.skip("no shared memory at /dev/shm that can be written to")
    return found


def no_memory_is_left(folder: Path, host: str = "") -> None:
    found = local.memory_folder(folder, host)
    assert found is None or not found.exists()


def test_how_much_is_in_memory_is_said(start: Callable[..., Run], tiered: None) -> None:
    """Of the steps that are kept, and of one that is saved just now; by status, and as a metric."""
    port = free_port("127.0.0.1")
    run = start("--metrics", f"127.0.0.1:{port}", seconds=0.1)
    in_memory(run)
    run.until_step(12)
    until, said = time.monotonic() + 30, ""
    while "of the memory of" not in said and time.monotonic() < until:
        command = [sys.executable, "-m", "ckpt.tools.run", "status", "--run-dir", str(run.files)]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert re.search(r"^steps take 0\.\d{3} GB of the memory of ", said, re.MULTILINE), said
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    found = re.search(r"^ckpt_run_memory_bytes (\d+)$", metrics, re.MULTILINE)
    assert found, metrics
    assert 0 < int(found[1]) < 1_000_000
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.said


def test_no_step_is_lost_that_is_in_memory(start: Callable[..., Run], tiered: None) -> None:
    """All ranks are killed; at most the step under way is done again."""
    run = start(seconds=0.1)
    in_memory(run)
    run.until_step(12)
    kill_all(run)
    assert run.end() == 0, run.said
    is_right(run)
    (failure,) = [e for e in run.record() if e["kind"] == "failure"]
    assert failure["facts"]["committed"] >= failure["facts"]["step"] - 1 >= 11
    assert ckpt.open(run.folder / "repo").steps()[-1] == 39
    assert not [p for p in in_memory(run).rglob("*") if p.is_file()], "the memory is free again"


def test_what_is_only_in_memory_comes_home(start: Callable[..., Run], tiered: None) -> None:
    """The job is given up while no rank can copy anything."""
    run = start("--restarts", "0", seconds=0.1)
    in_memory(run)
    run.until_step(12)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.end() == 1, run.said
    assert re.search(r"step \d+ was brought from file:///dev/shm/\S+ to file://", run.said), run.said
    assert ckpt.open(run.folder / "repo").steps()[-1] >= 11
    assert run.record()[-1]["kind"] == "note"
    assert not [p for p in in_memory(run).rglob("*") if p.is_file()]
    again = start()
    assert again.end() == 0, again.said
    is_right(again)


def test_ckpt_run_is_killed_with_steps_in_memory(start: Callable[..., Run], tiered: None) -> None:
    run = start(seconds=0.1)
    in_memory(run)
    run.until_step(12)
    pids = [run.pid(rank) for rank in range(RANKS)]
    run.process.kill()
    run.process.wait()
    assert none_left(pids)
    again = start()
    assert again.end() == 0, again.said
    is_right(again)
    assert min(int(line) for line in (run.folder / "begun").read_text().split()[RANKS:]) >= 12


# --- decisions -------------------------------------------------------------------------------------------------


def failure(step: int = 5, committed: int = 4, cause: str = "signal") -> Failure:
    return Failure(cause, (1,), "was killed by SIGKILL", step, committed, 10.0, restored=committed)  # type: ignore[arg-type]


def test_progress_fills_the_budget() -> None:
    budget, failures = Budget(3, 3), []
    for step in range(20):
        failures.append(failure(10 * step + 5, 10 * step))
        decision = decide(failures, budget)
        assert decision.action == "restart"
        assert decision.wait_seconds == 0
        budget = decision.budget


def test_without_progress_it_ends() -> None:
    budget, failures = Budget(5, 5), []
    for turn in range(6):
        failures.append(failure(step=turn, committed=-1))  # never at the same place
        decision = decide(failures, budget)
        budget = decision.budget
        if decision.action == "halt":
            break
    assert turn == 5
    assert "5 restarts without a newer step" in decision.reason
    waits = [decide(failures[: i + 1], Budget(5, 5 - i, i)).wait_seconds for i in range(4)]
    assert waits == sorted(waits)


def test_the_same_place_three_times() -> None:
    budget, failures = Budget(10, 10, best_step=4), []
    for turn in range(MAX_REPEATED_FAILURES):
        failures.append(failure())
        decision = decide(failures, budget)
        budget = decision.budget
        assert (decision.action == "halt") == (turn == MAX_REPEATED_FAILURES - 1)


def test_limits_are_learned() -> None:
    limits = HangLimits(factor=30, least_seconds=2)
    assert limits.limit_seconds("step") == 900
    for _ in range(20):
        limits.learn("step", 0.01)
    assert limits.limit_seconds("step") == 2
    limits.learn("step", 10.0)  # a step that took long is no hang the next time
    assert limits.limit_seconds("step") == 30
    for _ in range(20):
        limits.learn("step", 400.0)
    assert limits.limit_seconds("step") == 900, "never more than was given"
    assert limits.limit_seconds("end") == float("inf")


@pytest.mark.parametrize("phase", ["step", "save", "load", "eval", "compile"])
def test_the_limit_of_each_phase_is_learned(phase: str) -> None:
    limits = HangLimits(least_seconds=1)
    for _ in range(7):
        limits.learn(phase, 0.02)
    assert limits.limit_seconds(phase) == INITIAL_LIMIT_SECONDS[phase]
    for _ in range(93):
        limits.learn(phase, 0.02)
    assert limits.limit_seconds(phase) == (1 if phase == "step" else 30)
    others = set(INITIAL_LIMIT_SECONDS) - {phase}
    assert all(limits.limit_seconds(each) == INITIAL_LIMIT_SECONDS[each] for each in others)


def test_a_load_that_was_cut_off_is_given_more_time() -> None:
    limits = HangLimits(least_seconds=1)
    for phase in ("load", "step"):
        for _ in range(20):
            limits.learn(phase, 0.02)
        limits.learn_hang(phase, 31)
    assert (limits.limit_seconds("load"), limits.limit_seconds("step")) == (93, 1)


def test_one_limit_for_all_phases_as_long_as_nothing_is_learned() -> None:
    limits = HangLimits(least_seconds=1, initial_limit_seconds=uniform_initial_limits(3))
    assert {limits.limit_seconds(phase) for phase in PHASES if phase != "end"} == {3}
    assert limits.limit_seconds("end") == float("inf")


@settings(max_examples=100)
@given(st.sampled_from(sorted(INITIAL_LIMIT_SECONDS)), st.floats(1e-4, 30), st.lists(st.floats(1, 10), min_size=1, max_size=60))
def test_no_limit_is_below_ten_times_what_is_usual(phase: str, usual: float, times: list[float]) -> None:
    limits = HangLimits(least_seconds=1)
    for each in times:
        assert limits.limit_seconds(phase) >= usual * each
        limits.learn(phase, usual * each)


@pytest.mark.parametrize("phase", ["save", "eval"])
def test_a_hang_that_is_no_step(start: Callable[..., Run], phase: str) -> None:
    run = start("--hang", "3", "--first-hang", "8", fault=(f"hung-{phase}", 22, 2))
    assert run.end() == 0, run.said
    is_right(run)
    assert run.failures() == [("hang", [2])]
    assert f"in phase '{phase}'" in run.said


def test_a_page(tmp_path: Path) -> None:
    mine, theirs = HeartbeatPage(tmp_path / "p", new=True), HeartbeatPage(tmp_path / "p")
    assert (theirs.read().beats, theirs.read().step, theirs.read().phase, theirs.read().committed) == (0, -1, "start", -1)
    mine.beat(2, 7)
    mine.publish_committed(5)
    mine.publish_committed(3)
    mine.publish_loss(float("nan"))
    beat = theirs.read()
    assert (beat.beats, beat.step, beat.phase, beat.committed) == (1, 7, "step", 5)
    assert beat.loss != beat.loss
    assert abs(time.monotonic() - beat.since) < 60


def test_only_a_record_that_is_none_is_to_be_removed(tmp_path: Path) -> None:
    """It holds what was decided: a disk that is full, or can't be read now, is no reason to delete it."""
    (tmp_path / "run.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(CkptError, match="remove it, or give another --run-dir"):
        SqliteRunLog(tmp_path)
    (tmp_path / "other" / "run.sqlite").mkdir(parents=True)
    with pytest.raises(CkptError, match="free space on this disk, and check it, or give another --run-dir"):
        SqliteRunLog(tmp_path / "other")


# The interpreter and the package may lie where only root can read them: what may be needed is imported before.
_AS_NOBODY = """
import os, pkgutil, importlib
from ckpt import recovery, storage, tools
from ckpt.tools import run
for package in (recovery, storage, tools):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ImportError:  # of what is optional
            pass
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
run.main()
"""


def test_another_user_may_look(start: Callable[..., Run], tmp_path: Path) -> None:
    """And is told why it can't do more, where the files of the run are not its own."""
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)

        def asks(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", _AS_NOBODY, *words, "--run-dir", f"{folder}/run"]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")

        (tmp_path / "job").symlink_to(folder)
        run = start(steps=10_000)
        run.until_step(3)
        status = asks("status")
        assert (status.returncode, status.stderr) == (0, "")
        assert "only the user of the run can see its ranks" in status.stdout
        assert "rank 1 was killed by SIGKILL" in asks("plan", "--fail", "1").stdout
        for words in (("drain",), ("inject", "kill")):
            assert "run the command as the user of the run" in asks(*words).stderr
        run.process.terminate()
        assert run.end() == 128 + signal.SIGTERM
        for words in (("why",), ("report",)):
            done = asks(*words)
            assert (done.returncode, done.stderr) == (0, "")
        assert "it does not run: " in asks("status").stdout
        assert not list(Path(folder, "run").glob("run.sqlite-*")), "who only asks leaves nothing"


def test_status_shows_the_ranks_of_this_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A host whose ranks were ended still has their pages: as a spare, or until its next ones run."""
    drafts = [entry_drafts.draft_run(0, "r", RunSpec(("true",), 1, hosts=2, least=1))]
    for attempt, hosts in enumerate(("ab", "b")):
        members = [asdict(AttemptHost(name, f"{name}-1", i, 1)) for i, name in enumerate(hosts)]
        facts = {"ranks": len(members), "members": members, "address": "a", "port": 1, "memory": []}
        drafts.append(Draft(attempt, "start", "ranks", facts))
    entries = [LogEntry(1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
    reports = {}
    for name, attempt in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        pulse = HeartbeatPage(tmp_path / name / f"{attempt}-0", new=True)
        pulse.attach_process()
        pulse.beat(2, 70 + attempt)
        pulse.close()
        doing: Literal["running", "idle"] = "running" if attempt else "idle"
        reports[name] = AgentReport(name, f"{name}-1", 0.0, 1, str(tmp_path / name), "logs", "a", 1, attempt, doing)
    monkeypatch.setattr(run_queries, "_open_entries", lambda *_: entries)
    monkeypatch.setattr(run_queries, "_living_agents", lambda *_: reports)
    assert run_queries.status.main(["--run-dir", str(tmp_path)], standalone_mode=False) == 0
    shown = capfd.readouterr().out
    assert " 71 " in shown
    assert " 70 " not in shown, "that rank is no more"
    assert re.search("^a +spare", shown, re.MULTILINE)
    reports["b"] = replace(reports["b"], attempt=0)
    assert run_queries.status.main(["--run-dir", str(tmp_path)], standalone_mode=False) == 0
    shown = capfd.readouterr().out
    assert re.search("^b +waits", shown, re.MULTILINE)
    assert "no rank runs now; start: ranks" in shown


def test_no_room_for_a_page_names_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "0-0"))):
        HeartbeatPage(tmp_path / "0-0", new=True)
    assert not (tmp_path / "0-0").exists()
