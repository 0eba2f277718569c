"""A job with storage nodes and a memory tier, in which something fails again and again, while the nodes repair their namespace.

Each step that was acknowledged is restored or passed, the result has the right bits, and no process grows.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.faulty_runs import MARK, RUN, Faulty
from helpers.faulty_runs import assert_no_process_is_left as assert_no_process_is_left
from helpers.flipped_bits import flip_bit
from helpers.folders import PROGRAMS, fast_folder
from helpers.nodes import NodeProcess
from helpers.processes import SOAK, free_port, stop, until
from helpers.runs import RANKS, assert_no_memory_is_left, assert_result
from helpers.whole_namespaces import require_whole

import ckpt
from ckpt.aggregator.cluster.config import parse_namespace_url
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance.repair import repair_namespace
from ckpt.aggregator.maintenance.scrub import scrub_namespace
from ckpt.recovery.ranks import processes

SECONDS = 3600 * float(os.environ.get("CKPT_HOURS", "8")) if SOAK else 0
"""How long faults occur. One of each kind occurs in any case."""
PAUSE_SECONDS = 60 if SOAK else 0.2
"""The time between a recovery and the next fault."""
SEED = int(os.environ.get("CKPT_SEED", "0"))
NODES = 6
WARM_UP_SECONDS = 60
MORE_FILES, MORE_THREADS, MORE_BYTES = 60, 100, 150 << 20
"""By how much a process may grow after it has warmed up."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process uses."""

    files: int
    threads: int
    nbytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return cls(len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]), int(fields["VmRSS"].split()[0]) << 10)


class LongRun:
    """A job on this host that saves to nodes, and the faults that occur to it."""

    def __init__(self, folder: Path, draw: random.Random, end: ExitStack) -> None:
        self.folder, self._draw = folder, draw
        ports = [free_port() for _ in range(NODES)]
        self.url = f"ckpt://{','.join(f'127.0.0.1:{port}' for port in ports)}/run?redundancy=2x"
        repair = ("--repair", self.url.replace("/run", ""), "--repair-every", "3")
        self.nodes: list[NodeProcess] = []
        for i, port in enumerate(ports):
            self.nodes.append(NodeProcess(folder / f"node-{i}", *repair, port=port))
            end.callback(self.nodes[-1].close)
        self.first_seen: dict[int, float] = {}
        self.first_usage: dict[int, Usage] = {}
        self.job = folder / "job"
        self.job.mkdir()
        self.run = self._start()
        end.callback(lambda: self.run.close())
        until(lambda: self.step() > 5, "the job has begun")

    def _start(self) -> Faulty:
        program = (sys.executable, str(PROGRAMS / "long_job.py"), str(self.job), self.url, "0.05")
        return Faulty.of_command(self.job, [*RUN, "-n", str(RANKS), "--run-dir", str(self.job / "run"), "--", *program])

    def step(self) -> int:
        """Return the step at which rank 0 is; -1 before the first."""
        with suppress(FileNotFoundError, ValueError):
            return int((self.job / "at").read_text())
        return -1

    def acknowledged(self) -> int:
        """Return the newest step in the repository of record; -1 if there is none."""
        return max(ckpt.open(self.url).steps(), default=-1)

    def starts(self) -> list[int]:
        """Return the steps at which ranks began, in the order of time."""
        return [int(line) for line in (self.job / "begun").read_text().split()]

    # --- faults: each returns once it has ended ------------------------------------------------------------------

    def kill_rank(self) -> None:
        os.kill(self.run.pid(self._draw.randrange(RANKS)), signal.SIGKILL)

    def stop_rank(self) -> None:
        pid = self.run.pid(self._draw.randrange(RANKS))
        stop(pid)
        time.sleep(self._draw.uniform(0.1, 2))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def kill_node(self) -> None:
        node = self._draw.choice(self.nodes)
        node.kill()
        time.sleep(self._draw.uniform(0, 3))
        node.start()

    def stop_node(self) -> None:
        node = self._draw.choice(self.nodes)
        node.signal(signal.SIGSTOP)
        time.sleep(self._draw.uniform(0.1, 5))
        node.signal(signal.SIGCONT)

    def kill_coordinator(self) -> None:
        self.run.process.kill()
        self.run.process.communicate()
        until(lambda: not processes.find_processes([self.job], f"{MARK}={self.job}"), "the ranks have ended")
        self.run = self._start()

    def flip_bytes(self) -> None:
        """Flip a bit in some objects of one node, and wait until a repair has found them."""
        node = self._draw.choice(self.nodes)
        objects = [path for path in (node.folder / "objects").rglob("*") if path.is_file()]
        for path in self._draw.sample(objects, min(3, len(objects))):
            with suppress(FileNotFoundError, ZeroDivisionError):  # it was deleted meanwhile, or has no byte yet
                flip_bit(path, self._draw.randrange(1 << 20))
        with self.namespace() as namespace:
            until(lambda: not repair_namespace(namespace, scrub_namespace(namespace, verify=True)).failed, "it is repaired")

    # --- checks --------------------------------------------------------------------------------------------------

    @contextmanager
    def namespace(self) -> Iterator[Namespace]:
        """Yield the namespace of the nodes, as an administrator opens it."""
        namespace = Namespace(parse_namespace_url(self.url)[0])
        try:
            yield namespace
        finally:
            namespace.close()

    def fail(self, fault: Callable[[LongRun], None]) -> None:
        """Let a fault occur, and wait until the job has passed the step at which it was."""
        acknowledged, before, begun = self.acknowledged(), self.step(), len(self.starts())
        fault(self)
        until(lambda: self.step() > before + 2 or self.run.process.poll() is not None, f"a step after {fault.__name__}")
        assert self.run.process.poll() is None, self.run.process.communicate()
        restored = self.starts()[begun:]
        assert all(start > acknowledged for start in restored), f"step {acknowledged} was acknowledged before {restored}"

    def check_growth(self) -> None:
        """Fail if a node or ckpt-run uses much more than at the first check after its warm-up."""
        for pid in (self.run.process.pid, *(node.process.pid for node in self.nodes)):
            now = time.monotonic()
            if now < self.first_seen.setdefault(pid, now) + WARM_UP_SECONDS:
                continue
            usage = Usage.of(pid)
            first = self.first_usage.setdefault(pid, usage)
            assert usage.files <= first.files + MORE_FILES, (pid, first, usage)
            assert usage.threads <= first.threads + MORE_THREADS, (pid, first, usage)
            assert usage.nbytes <= first.nbytes + MORE_BYTES, (pid, first, usage)

    def finish(self) -> None:
        """Let the job end, and check its result, its memory and its namespace."""
        last = self.step() + 20
        (self.job / "stop.new").write_text(str(last))
        (self.job / "stop.new").rename(self.job / "stop")
        assert self.run.end() == 0, self.run.messages
        assert_result(self.run, last + 1)
        assert_no_memory_is_left(self.run.files)
        assert ckpt.open(self.url).steps()[-1] == last
        with self.namespace() as namespace:
            repair_namespace(namespace, scrub_namespace(namespace, verify=True, grace_seconds=0))
            require_whole(namespace, verify=True)
        for step in ckpt.open(self.url).steps():
            assert ckpt.open(self.url)[step].verify() > 0


FAULTS: tuple[Callable[[LongRun], None], ...] = (
    LongRun.kill_rank, LongRun.stop_rank, LongRun.kill_node, LongRun.stop_node, LongRun.kill_coordinator, LongRun.flip_bytes,
)  # fmt: skip


@pytest.mark.soak
def test_a_job_with_a_fault_each_minute_loses_nothing_and_does_not_grow(tmp_path: Path, count_cases: CountCases) -> None:
    print(f"CKPT_SEED={SEED}")
    draw, count = random.Random(SEED), 0
    deadline = time.monotonic() + SECONDS
    with fast_folder(tmp_path) as folder, ExitStack() as end:
        run = LongRun(folder, draw, end)
        while not count or time.monotonic() < deadline:
            for fault in draw.sample(FAULTS, len(FAULTS)):
                run.fail(fault)
                run.check_growth()
                count += 1
                time.sleep(PAUSE_SECONDS)
        run.finish()
    count_cases(count)
