"""Whole jobs under ckpt-run, and what can happen to them and to what they keep their steps in: they end as if it had not been.

What the other files of tests of ckpt-run have is not here again. After each test nothing that a job has started runs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from cluster import Process
from support import SOAK, fast_folder, snapshot
from test_run import RANKS, Run, in_memory, is_right, no_memory_is_left
from test_run_hosts import Job, leader_of, starts
from test_run_hosts import is_right as rows_are_right
from test_run_hosts import job as job
from test_tiers import flip

import ckpt
from ckpt.recovery.policy.decide import MAX_REPEATED_FAILURES, Budget, Failure, decide
from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.training.heartbeat_page import HeartbeatPage, RankHeartbeat

PROGRAM = str(Path(__file__).parent / "faults_program.py")
RUN = [sys.executable, "-m", "ckpt.tools.run"]
MARK = "CKPT_TEST_JOB"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, however the job has ended."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    until(lambda: not processes.find_processes([], f"{MARK}={tmp_path}"), "all processes have ended")


def until(true: Callable[[], object], what: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not come to this: {what}"
        time.sleep(0.01)


class Faulty(Run):
    """A job of three ranks with a program that can be told where to keep its steps, and what is to go wrong."""

    def __init__(
        self, folder: Path, *options: str, url: str = "", tiers: tuple[str, ...] = (), fault: str = "", steps: int = 40,
        seconds: float = 0.02, failpoints: str = "", quiet_ranks: bool = False, group: Path | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.files = folder / "run"
        command = [*RUN, "-n", str(RANKS), "--run-dir", str(self.files), *options, "--"]
        if quiet_ranks:  # the fail points are for ckpt-run alone
            command += ["env", "CKPT_FAILPOINTS="]
        command += [sys.executable, PROGRAM, str(folder), url or str(folder / "repo"), str(steps), str(seconds), fault, *tiers]
        if group is not None:
            command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env=os.environ | {"CKPT_FAILPOINTS": failpoints},
        )  # fmt: skip

    def log(self) -> list[LogEntry]:
        record = SqliteRunLog(self.files)
        try:
            return record.entries()
        finally:
            record.close()

    def until_step(self, step: int, attempt: int = 0) -> None:
        until(lambda: all(self.step(rank, attempt) >= step for rank in range(RANKS)), f"step {step}")

    def step(self, rank: int, attempt: int) -> int:
        beat = self.beat(rank, attempt)
        return -1 if beat is None else beat.step

    def beat(self, rank: int, attempt: int) -> RankHeartbeat | None:
        found = [entry.facts["pages"] for entry in self.log() if (entry.kind, entry.attempt) == ("start", attempt)]
        try:
            return HeartbeatPage(Path(found[0]) / f"{attempt}-{rank}").read() if found else None
        except FileNotFoundError:
            return None

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.log()]

    def kill_ranks(self) -> None:
        pids = [self.pid(rank) for rank in range(RANKS)]
        for pid in pids:
            with suppress(ProcessLookupError):  # ckpt-run has ended it for the first
                os.kill(pid, signal.SIGKILL)
        until(lambda: all(processes.process_state(pid) in ("", "Z") for pid in pids), "the ranks are dead")

    def newest(self) -> int:
        """The newest step that is committed."""
        steps = (self.folder / "repo").glob("steps/*/commit.json")
        return max((int(commit.parent.name) for commit in steps), default=-1)

    def restored(self) -> list[int]:
        """At which step each rank began, in the last attempt that came to that."""
        return [int(line) for line in (self.folder / "begun").read_text().split()[-RANKS:]]


Starter = Callable[..., Faulty]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    made: list[Faulty] = []

    def begin(*options: str, **more: object) -> Faulty:
        made.append(Faulty(tmp_path / "job", *options, **more))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for run in made:
        run.close()
        left = {Path(entry.facts["pages"]) for entry in run.log() if entry.kind == "start"}
        until(lambda left=left: not any(map(Path.exists, left)), "the memory for the pages of the ranks is free")


def ends_well(run: Faulty, steps: int = 40) -> None:
    assert run.end() == 0, run.said
    is_right(run, steps)


# --- storage nodes -----------------------------------------------------------------------------------------------


@contextmanager
def nodes(folder: Path, count: int) -> Iterator[list[Process]]:
    made = [Process(folder / f"node-{i}") for i in range(count)]
    try:
        yield made
    finally:
        for node in made:
            node.close()


def url_of(made: list[Process], name: str = "run") -> str:
    return f"ckpt://{','.join(node.address for node in made)}/{name}?redundancy=2x"


def test_a_storage_node_is_killed_while_the_job_runs(start: Starter, tmp_path: Path) -> None:
    """Nothing of the job needs to start again."""
    with nodes(tmp_path, 3) as storage:
        run = start(url=url_of(storage), seconds=0.05)
        run.until_step(12)
        storage[0].kill()
        ends_well(run)
        assert run.failures() == []
        assert ckpt.open(url_of(storage)).steps()[-1] == 39


def test_a_storage_node_is_killed_while_the_job_restarts(start: Starter, tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as storage:
        run = start(url=url_of(storage), seconds=0.05, failpoints="namespace.read=sleep:0.3@*")
        run.until_step(12)
        run.kill_ranks()
        until(lambda: (beat := run.beat(0, attempt=1)) is not None and beat.phase == "load", "it restores")
        storage[1].kill()
        ends_well(run)
        assert [cause for cause, _ in run.failures()] == ["signal"]


def test_all_storage_nodes_are_away_for_a_while(start: Starter, tmp_path: Path) -> None:
    """Longer than it takes to fail some times in a row."""
    with nodes(tmp_path, 2) as storage:
        run = start(url=url_of(storage), seconds=0.05)
        run.until_step(12)
        for node in storage:
            node.kill()
        until(lambda: run.kinds().count("failure") > MAX_REPEATED_FAILURES, "a save has failed, and then some restarts")
        for node in storage:
            node.start()
        ends_well(run)
        assert min(run.restored()) >= 5


def test_what_began_before_is_not_given_up_at_once() -> None:
    """Where it does not come to a step any more it waits, longer and longer, and not for ever."""
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


def test_damage_is_no_storage_that_is_away() -> None:
    """It stays as it is: after three tries that is the end, with what to do."""
    failures, budget = [Failure("exit", (1,), "exited with status 1", 12, 9, 10.0, restored=5)], Budget()
    while (decision := decide(failures, budget)).action == "restart":
        budget = decision.budget
        failures.append(Failure("damaged", (0, 1), "exited with status 1", -1, -1, 1.0))
    assert len(failures) == 1 + MAX_REPEATED_FAILURES
    assert "3 times in a row, as no saved step is whole; bring back the files of one, or remove all of them" in decision.reason


def test_memory_on_two_nodes_and_one_is_killed_together_with_a_rank(start: Starter, tmp_path: Path) -> None:
    """As where a host is lost with its part of the memory tier. Every step is in the other one, but for a save under way."""
    with fast_folder(tmp_path) as folder, nodes(folder, 2) as memory:
        run = start(tiers=(url_of(memory, "near"),), seconds=0.1)
        run.until_step(12)
        memory[0].kill()
        os.kill(run.pid(1), signal.SIGKILL)
        ends_well(run)
        (failure,) = [e for e in run.log() if e.kind == "failure"]
        assert min(run.restored()) > failure.facts["committed"]
        assert min(run.restored()) >= failure.facts["step"] - 1 >= 11
        assert ckpt.open(run.folder / "repo").steps()[-1] == 39


# --- disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["save.append=full@2", "local.fsync=error@3", "save.commit=full@2"])
def test_a_save_in_the_background_fails(start: Starter, point: str) -> None:
    run = start(fault=f"points:0:{point}")
    ends_well(run)
    assert [cause for cause, _ in run.failures()] == ["exit"], run.said
    assert f"injected at fail point {point.partition('=')[0]}" in run.said
    assert ckpt.open(run.folder / "repo").steps()[-1] == 39


def test_a_disk_that_is_full_for_a_while(start: Starter, tmp_path: Path) -> None:
    """Really full; somebody makes room."""
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
        ends_well(run)
        assert run.failures()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def with_bytes(folder: Path, pattern: str) -> list[Path]:
    """The files of this pattern below it, without those that a killed rank had only just created."""
    return [path for path in folder.rglob(pattern) if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize("where", ["memory", "nvme", "repo", "memory nvme"])
def test_a_byte_is_flipped_between_kill_and_restart(start: Starter, tmp_path: Path, where: str) -> None:
    """In each file of the newest step there: it comes from the next place, or is an older one."""
    nvme = str(tmp_path / "nvme")
    run = start(tiers=("memory", nvme), seconds=0.06, steps=24)
    places = {"memory": in_memory(run), "nvme": Path(nvme), "repo": run.folder / "repo"}
    run.until_step(13)
    run.process.send_signal(signal.SIGSTOP)
    run.kill_ranks()
    flipped = 0
    for name in where.split():
        commits = sorted(places[name].rglob("steps/*/commit.json"), key=lambda path: int(path.parent.name))
        for path in with_bytes(commits[-1].parent, "*"):
            flip(path)
            flipped += 1
    assert flipped >= 2
    run.process.send_signal(signal.SIGCONT)
    ends_well(run, 24)
    assert len(run.failures()) == 1
    least = {"memory": 10, "nvme": 12, "repo": 12, "memory nvme": 5}
    assert min(run.restored()) >= least[where]
    saved = next(entry.facts["committed"] for entry in run.log() if entry.kind == "failure")
    assert ("no later one is whole" in run.said) == (min(run.restored()) <= saved)
    assert ckpt.load(run.folder / "repo", group=None)["w"].shape == (4 * RANKS, 100)


def test_the_memory_tier_is_cleared(start: Starter) -> None:
    """By somebody who cleans up /dev/shm, beneath the ranks that save there."""
    run = start(tiers=("memory",), seconds=0.06, steps=40)
    memory = in_memory(run)
    run.until_step(13)
    shutil.rmtree(memory, ignore_errors=True)
    ends_well(run, 40)
    assert len(run.failures()) == 1


def test_all_steps_are_damaged(start: Starter) -> None:
    """In all places. It is given up with the reason, and nothing is begun anew over them, or removed."""
    run = start(tiers=("memory",), seconds=0.06, steps=10_000)
    places = [in_memory(run), run.folder / "repo"]
    run.until_step(7)
    run.process.send_signal(signal.SIGSTOP)
    run.kill_ranks()
    for path in [path for place in places for path in with_bytes(place, "steps/**/*")]:
        flip(path)
    before = snapshot(run.folder / "repo/steps")
    run.process.send_signal(signal.SIGCONT)
    assert run.end() == 1
    assert list(places[0].rglob("steps/*/commit.json"))
    shutil.rmtree(places[0])
    assert [cause for cause, _ in run.failures()] == ["signal", *["damaged"] * MAX_REPEATED_FAILURES]
    assert (
        f"{MAX_REPEATED_FAILURES} times in a row, as no saved step is whole; bring back the files of one, or remove all"
        in run.said
    )
    assert re.search(rf"look at {run.files}/logs/{MAX_REPEATED_FAILURES}/rank-\d.log", run.said)
    assert snapshot(run.folder / "repo/steps") == before


# --- ckpt-run itself ---------------------------------------------------------------------------------------------


ALL_POINTS = [f"coordinator.{kind}{written}" for kind in ("start", "failure", "stop", "end") for written in ("", ".written")]
ALL_POINTS += ["agent.start", "agent.started", "agent.stop"]
SOME_POINTS = ["coordinator.start.written", "coordinator.failure", "coordinator.stop.written", "agent.started"]
POINTS = ALL_POINTS if SOAK else SOME_POINTS


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
def test_ckpt_run_is_killed_at_each_point(start: Starter, point: str) -> None:
    """Alone on its host nobody takes over: started again, it goes on from what was saved."""
    run = start("--cold", failpoints=f"{point}=kill", steps=20, seconds=0.03)
    if "failure" in point or "coordinator.stop" in point:
        until(lambda: run.newest() >= 4, "something is saved")
    if "failure" in point:
        os.kill(run.pid(1), signal.SIGKILL)
    if "coordinator.stop" in point:
        run.process.send_signal(signal.SIGTERM)
    assert run.end() == -signal.SIGKILL, run.said
    until(lambda: not processes.find_processes([], f"{MARK}={run.folder.parent}"), "its ranks have ended")
    saved = run.newest()
    again = start("--cold", steps=20)
    ends_well(again, 20)
    assert again.restored() == [saved + 1] * RANKS
    assert again.kinds()[-1] == "end"


@pytest.mark.parametrize("point", ["promote.pack", "promote.committed"])
def test_ckpt_run_is_killed_while_it_brings_steps_home(start: Starter, point: str) -> None:
    run = start("--restarts", "0", tiers=("memory",), seconds=0.05, failpoints=f"{point}=kill", quiet_ranks=True)
    in_memory(run)
    run.until_step(12)
    run.kill_ranks()
    assert run.end() == -signal.SIGKILL, run.said
    again = start(tiers=("memory",))
    ends_well(again)
    assert min(again.restored()) >= 12
    assert not [path for path in in_memory(run).rglob("*") if path.is_file()]


def test_ckpt_run_is_stopped_for_a_while(start: Starter) -> None:
    """The ranks go on without it."""
    run = start("--hang", "1", steps=80)
    run.until_step(5)
    run.process.send_signal(signal.SIGSTOP)
    run.until_step(60)
    run.process.send_signal(signal.SIGCONT)
    ends_well(run, 80)
    assert run.failures() == []


@pytest.mark.parametrize("whom", ["ckpt-run", "ranks", "all"])
def test_a_storm_of_sigterm_during_a_save(start: Starter, whom: str) -> None:
    """As where a scheduler signals all processes of a job, again and again."""
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
        ends_well(run)
        return
    assert run.end() == 128 + signal.SIGTERM, run.said
    saved = run.newest()
    again = start()
    ends_well(again)
    assert again.restored() == [saved + 1] * RANKS
    assert saved >= 4


def test_sigterm_to_each_process_of_a_job(start: Starter) -> None:
    """As systemd ends a service: once to each. The job is saved at the step under way, and not lost since the last save."""
    run = start(steps=200)
    run.until_step(11)
    for pid in (*(run.pid(rank) for rank in range(RANKS)), run.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.said
    assert "have saved and ended, as SIGTERM asked" in run.said
    saved = run.newest()
    again = start(steps=200)
    ends_well(again, 200)
    assert again.restored() == [saved + 1] * RANKS


def test_sigterm_to_one_rank(start: Starter) -> None:
    """Nobody wants the job to end: it comes back."""
    run = start(steps=200)
    run.until_step(11)
    os.kill(run.pid(1), signal.SIGTERM)
    ends_well(run, 200)
    assert run.failures() == [("signal", [1])]
    assert "rank 1 was asked to end by SIGTERM after step" in run.said


def test_what_a_rank_starts_does_not_hold_sigterm(tmp_path: Path) -> None:
    """A loader's worker is ended by it. Neither is a handler of the program's own replaced."""
    program = (
        "import ckpt, os, signal, time\n"
        "ck = ckpt.Checkpointer('a'); assert callable(signal.getsignal(signal.SIGTERM))\n"
        "if (child := os.fork()) == 0: time.sleep(1000)\n"
        "os.kill(child, signal.SIGTERM); assert os.waitpid(child, 0)[1] == signal.SIGTERM\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "ckpt.Checkpointer('b').close(); assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN\n"
    )
    HeartbeatPage(tmp_path / "page", new=True).close()
    told = os.environ | {"CKPT_PULSE": str(tmp_path / "page")}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=told, check=True, timeout=60)


def test_a_host_is_lost_together_with_the_coordinator(job: Callable[..., Job]) -> None:
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
    so_far = len(run.log())  # on a slow machine others may have led before
    left = sorted(set("abcd") - {leader, other})
    assert set(run.ends(*left).values()) == {0}
    log = run.log()
    assert sorted(starts(log)[-1]) == left
    assert {entry.facts["name"] for entry in log[so_far:] if entry.kind == "lead"} <= set(left)
    assert leader_of(log) in left
    rows_are_right(run, 4)


# --- ranks -------------------------------------------------------------------------------------------------------


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group whose processes get no more memory than that together."""
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


def test_out_of_memory(start: Starter) -> None:
    """A real kill by the kernel."""
    with memory_group(800 << 20) as group:
        run = start(fault="memory:2:17", group=group)
        ends_well(run)
    assert run.failures() == [("out of memory", [2])]
    assert "rank 2 was killed by the kernel, as there was no memory left (SIGKILL)" in run.said


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


def test_an_exception_while_others_wait_in_a_collective(tmp_path: Path) -> None:
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


# --- what cannot be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words", "times"),
    [
        ("ckpt://127.0.0.1:1/run", "127.0.0.1:1", MAX_REPEATED_FAILURES),  # it may be about to start
        ("{}/file/repo", "Not a directory", 1),
        ("/proc/nowhere", "has no directories", 1),
    ],
)
def test_a_url_that_cannot_be_used(start: Starter, tmp_path: Path, url: str, words: str, times: int) -> None:
    """The job is given up, with what the ranks have said of it; at once where waiting does not help."""
    (tmp_path / "file").touch()
    run = start("--cold", url=url.format(tmp_path))
    assert run.end() == 1
    lines = run.said.splitlines()
    found = re.search(rf"ckpt-run: ranks? [012, ]+ exited with status 1 \(.*{words}.*look at (.*)$", lines[-1])
    assert found, run.said
    assert len(lines) == times
    assert words in Path(found[1]).read_text()
    assert "whether a rank has died" not in run.said
    assert "Traceback" not in run.said


def test_a_metrics_port_that_is_taken_ends_no_run(start: Starter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        run = start("--metrics", where)
        assert run.end() == 0
    no_metrics = f"no metrics are served: {where} can't be listened on: Address already in use; give another --metrics"
    assert one_line(run) == no_metrics
    no_memory_is_left(run.files)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--run-dir", "{}/file"], 1, "file can't be used: File exists; give another --run-dir"),
        (["--nnodes", "3", "--give-up", "0.5"], 1, "1 of 3 hosts came within 0.5 s; start ckpt-run on more, or lower --min"),
        (["--nnodes", "2", "--min", "3"], 1, "--min 3 is more than the 2 hosts of --nnodes"),
        (["--nnodes", "2", "--state", "etcd://127.0.0.1:1/lab"], 1, "127.0.0.1:1"),
        (["--nnodes", "2", "--state", "nosuch://127.0.0.1:1/lab"], 1, "write etcd://HOST:PORT/NAME"),
    ],
)
def test_options_that_cannot_be_used(tmp_path: Path, options: list[str], status: int, words: str) -> None:
    (tmp_path / "file").touch()
    command = [*RUN, "--run-dir", str(tmp_path / "run"), *(option.format(tmp_path) for option in options), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    no_memory_is_left(tmp_path / "run", socket.gethostname())


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1 2 3")
    command = [*RUN, "--run-dir", str(tmp_path / "run"), "--", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    said = f"ckpt-run: {tmp_path}/data can't be started: Permission denied; give a command that runs by itself\n"
    assert done.stderr == said


def one_line(run: Faulty) -> str:
    """What it said, where that is but one line."""
    (line,) = run.said.splitlines()
    return line.removeprefix("ckpt-run: ")
