"""Writes the stacks of the threads of ranks, by py-spy or by a signal to the rank."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.recovery.ranks import processes
from ckpt.recovery.ranks.page_owner import signal_page_owner
from ckpt.recovery.ranks.rank_process import RankProcess
from ckpt.storage.base.threads import WorkerThread, join_all, start_available
from ckpt.training.heartbeat_page import STACKS_SIGNAL
from ckpt.training.heartbeat_records import RankHeartbeat

_STACK_READERS, _STACK_SECONDS = 8, 5.0
"""How many stacks are read at a time, and how long one may take."""


def save_stacks(ranks: Sequence[RankProcess], heartbeats: Mapping[int, RankHeartbeat]) -> None:
    """Write the stacks of all threads of these ranks next to their logs."""
    py_spy = _find_py_spy()
    waiting = deque(ranks)

    def save_waiting() -> None:
        with contextlib.suppress(IndexError):
            while True:
                rank = waiting.popleft()
                with contextlib.suppress(OSError, MemoryError):  # the ranks must be ended, with or without their stacks
                    _save_stack(rank, heartbeats[rank.number], py_spy)

    readers = [WorkerThread(target=save_waiting, name="ckpt-stacks") for _ in range(min(_STACK_READERS, len(ranks)) - 1)]
    start_available(readers)
    save_waiting()
    join_all(readers, lambda _: waiting.clear())


def _save_stack(rank: RankProcess, beat: RankHeartbeat, py_spy: str | None) -> None:
    if py_spy is not None and _dump_stacks(py_spy, rank):
        return
    if beat.pid == rank.pid and processes.process_state(rank.pid) != "T":
        # The rank writes them into its own log. That of mpiexec is not a child of this process, so its number may be another's.
        with contextlib.suppress(ProcessLookupError):
            if not rank.is_shared:
                os.kill(rank.pid, STACKS_SIGNAL)
            elif not signal_page_owner(Path(rank.heartbeat_page.path), rank.pid, STACKS_SIGNAL):
                return
            time.sleep(0.2)


def _dump_stacks(py_spy: str, rank: RankProcess) -> bool:
    """Write the stacks of a rank by py-spy. Return False if it lacks the permission or does not support this Python."""
    command = [py_spy, "dump", "--nonblocking", "--pid", str(rank.pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        with (rank.log.parent / f"rank-{rank.number}.stacks").open("wb") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=_STACK_SECONDS, check=False)
        return done.returncode == 0
    return False


def _find_py_spy() -> str | None:
    in_environment = Path(sys.executable).parent / "py-spy"
    return str(in_environment) if in_environment.exists() else shutil.which("py-spy")
