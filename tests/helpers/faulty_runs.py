"""ckpt-run with programs/faulty_job.py, whose steps are saved to any storage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.training.heartbeat_page import HeartbeatPage
from ckpt.training.heartbeat_records import RankHeartbeat
from helpers.folders import PROGRAMS
from helpers.host_runs import job as job
from helpers.nodes import NodeProcess
from helpers.processes import until
from helpers.runs import RANKS, Run, assert_result

PROGRAM = str(PROGRAMS / "faulty_job.py")
RUN = [sys.executable, "-m", "ckpt.tools.run"]
MARK = "CKPT_TEST_JOB"


@pytest.fixture(autouse=True)
def assert_no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no process is left, however the job has ended."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    until(lambda: not processes.find_processes([], f"{MARK}={tmp_path}"), "all processes have ended")


def _start(command: list[str], failpoints: str = "") -> subprocess.Popen[str]:
    environment = os.environ | {"CKPT_FAILPOINTS": failpoints}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)


class Faulty(Run):
    """A job of three ranks whose storage and faults a test chooses. Its last step waits for `end`, as in `Run`."""

    def __init__(
        self, folder: Path, *options: str, url: str = "", tiers: tuple[str, ...] = (), fault: str = "", steps: int = 40,
        seconds: float = 0.02, failpoints: str = "", quiet_ranks: bool = False, group: Path | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.hold()
        self.files = folder / "run"
        command = [*RUN, "-n", str(RANKS), "--run-dir", str(self.files), *options, "--"]
        if quiet_ranks:  # the fail points apply to ckpt-run alone
            command += ["env", "CKPT_FAILPOINTS="]
        command += [sys.executable, PROGRAM, str(folder), url or str(folder / "repo"), str(steps), str(seconds), fault, *tiers]
        if group is not None:
            command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
        self.process = _start(command, failpoints)

    @classmethod
    def of_command(cls, folder: Path, command: list[str]) -> Faulty:
        """Start a command of ckpt-run whose run directory is FOLDER/run."""
        run = cls.__new__(cls)
        run.folder, run.files, run.process = folder, folder / "run", _start(command)
        return run

    def log(self) -> list[LogEntry]:
        """Return the entries of the run log."""
        run_log = SqliteRunLog(self.files)
        try:
            return run_log.entries()
        finally:
            run_log.close()

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
            with suppress(ProcessLookupError):  # ckpt-run may have ended it after the first died
                os.kill(pid, signal.SIGKILL)
        until(lambda: all(processes.process_state(pid) in ("", "Z") for pid in pids), "the ranks are dead")

    def newest(self) -> int:
        """Return the newest committed step, or -1."""
        steps = (self.folder / "repo").glob("steps/*/commit.json")
        return max((int(commit.parent.name) for commit in steps), default=-1)

    def restored(self) -> list[int]:
        """Return the step from which each rank started in the last attempt that got so far."""
        return [int(line) for line in (self.folder / "begun").read_text().split()[-RANKS:]]


Starter = Callable[..., Faulty]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Yield a function that starts a job; the jobs are ended after the test."""
    made: list[Faulty] = []

    def begin(*options: str, **more: object) -> Faulty:
        made.append(Faulty(tmp_path / "job", *options, **more))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for run in made:
        run.close()
        left = {Path(entry.facts["pages"]) for entry in run.log() if entry.kind == "start"}
        until(lambda left=left: not any(map(Path.exists, left)), "the memory for the pages of the ranks is free")


def assert_ends_well(run: Faulty, steps: int = 40) -> None:
    """Check that a job ends with status 0 and the right result."""
    assert run.end() == 0, run.messages
    assert_result(run, steps)


@contextmanager
def nodes(folder: Path, count: int) -> Iterator[list[NodeProcess]]:
    """Start this number of nodes, and end them after the body."""
    made = [NodeProcess(folder / f"node-{i}") for i in range(count)]
    try:
        yield made
    finally:
        for node in made:
            node.close()


def url_of(made: list[NodeProcess], name: str = "run") -> str:
    """Return a ckpt:// URL of these nodes."""
    return f"ckpt://{','.join(node.address for node in made)}/{name}?redundancy=2x"


def nonempty_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of this pattern below the folder, without empty ones that a killed rank had only just created."""
    return [path for path in folder.rglob(pattern) if path.is_file() and path.stat().st_size]
