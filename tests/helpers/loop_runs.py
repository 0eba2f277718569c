"""Ranks of a training loop, each under a heartbeat page of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.recovery.policy.coordinated_stop import StopRequest, next_stop
from ckpt.recovery.policy.loss_rollback import RollBack, rollback_environment
from ckpt.training import heartbeat_page
from ckpt.training.heartbeat_page import HeartbeatPage
from ckpt.training.heartbeat_records import BadLoss, RankHeartbeat
from helpers.folders import PROGRAMS

PROGRAM = str(PROGRAMS / "loop_rank.py")
RANKS = 4


class Job:
    """Ranks as processes, and their heartbeat pages, which the test reads in place of an agent."""

    def __init__(self, folder: Path, *arguments: object, size: int = RANKS, **environ: str) -> None:
        self.folder = folder
        self.pages = [HeartbeatPage(folder / f"page-{rank}", new=True) for rank in range(size)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, PROGRAM, str(folder), *map(str, arguments)], stderr=subprocess.PIPE, text=True,
                env=os.environ | environ | {
                    "RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": str(time.monotonic_ns()),
                    "CKPT_RUN_ID": f"{folder}{id(self)}", heartbeat_page.PAGE_VARIABLE: str(folder / f"page-{rank}"),
                },
            )
            for rank in range(size)
        ]  # fmt: skip

    def beats(self) -> list[RankHeartbeat]:
        return [page.read() for page in self.pages]

    def until(self, reached: Callable[[list[RankHeartbeat]], bool]) -> None:
        """Wait until a condition holds for the heartbeats of all ranks."""
        deadline = time.monotonic() + 600
        while not reached(self.beats()):
            assert time.monotonic() < deadline
            assert all(p.poll() is None for p in self.processes), self.kill()
            time.sleep(0.005)

    def stop(self, look_seconds: float) -> StopRequest:
        """Request a stop like a coordinator that checks every `look_seconds` and writes one page after another."""
        request: StopRequest | None = None
        while request is None or not request.agreed:
            before, running = request, [page for page, p in zip(self.pages, self.processes, strict=True) if p.poll() is None]
            request = next_stop(before, [(b.step, b.acknowledged_stop) for b in (page.read() for page in running)])
            for page in running if request != before else ():
                if request.agreed:
                    page.confirm_stop(request.step)
                else:
                    page.request_stop(request.step)
                time.sleep(0.002)
            time.sleep(look_seconds)
        return request

    def end(self) -> list[str]:
        """Wait until all ranks end with status 0, and return their messages."""
        messages = [p.communicate(timeout=600)[1] for p in self.processes]
        assert [p.returncode for p in self.processes] == [0] * len(self.processes), messages
        return messages

    def kill(self) -> list[tuple[int, str]]:
        """Kill the ranks, and return the exit status and the messages of each."""
        for process in self.processes:
            process.kill()
        messages = [p.communicate()[1] for p in self.processes if p.stderr and not p.stderr.closed]
        return [(p.returncode, text) for p, text in zip(self.processes, messages, strict=False)]

    def close(self) -> None:
        self.kill()
        for page in self.pages:
            page.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Yield a function that starts the ranks of a job; they are ended after the test."""
    made: list[Job] = []

    def begin(*arguments: object, **options: Any) -> Job:
        made.append(Job(tmp_path, *arguments, **options))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def page_of(beats: list[RankHeartbeat]) -> list[BadLoss | None]:
    """Return the bad loss of each heartbeat."""
    return [beat.bad for beat in beats]


def rollback_variables(decision: RollBack) -> dict[str, str]:
    """Return the variables that a decision sets for the ranks of the next attempt."""
    return rollback_environment(decision.skip, decision.restore_step_limit, decision.loss_limit)
