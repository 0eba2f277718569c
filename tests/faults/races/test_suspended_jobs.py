"""A job whose processes are all stopped for longer than their timeouts, as a suspended job of a cluster, continues afterwards.

No process of it was slow, so none may be given up. The time for which a process was stopped does not count as a wait.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import finish, python, stop, until
from helpers.saving_ranks import clean

import ckpt
from ckpt.recovery.memory_tier.memory_nodes import MemoryNodes
from ckpt.storage.node.security_options import NodeSecurity
from ckpt.tiers import memory_folder
from ckpt.training.heartbeat_page import HeartbeatPage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops processes as Linux has them, and looks at them in /proc")

TIMEOUT_SECONDS = 8

SAVES = """
import os, sys
import numpy as np
import ckpt
from ckpt.groups import EnvGroup

rank, size, seconds = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), float(sys.argv[2])
state = {"w": ckpt.Shard(np.full(1000, rank), (1000 * size,), (1000 * rank,))}
group = EnvGroup(timeout=seconds)
for step in range(2):
    print("ready", flush=True)
    input()
    ckpt.save(state, sys.argv[1], step=step, group=group, timeout=seconds)
"""

SHARES_A_WINDOW = """
import sys
from ckpt.groups import EnvGroup
from ckpt.loading import shared_window
from ckpt.storage.local.directory import LocalStore
from helpers.shared_windows import window_of

shared_window.GROUP_TIMEOUT_SECONDS = float(sys.argv[2])
group = EnvGroup()
group.meet_at(LocalStore(sys.argv[1]))
window = window_of(group, 2, 1)
print("ready", flush=True)
input()
if group.rank:
    window.mark_ready(0)
else:
    open(f"{sys.argv[1]}/waiting", "w").close()
    window.wait_until_ready(0, 1)
group.all_gather(b"")
"""

CALLS_A_STORE = """
import sys
from ckpt.storage.base.call_timeout import call_in_thread

print("ready", flush=True)
assert call_in_thread(input, "a listing") == "answer"
"""

WAITS_AT_A_STOP = """
import sys
from ckpt.training import heartbeat_page

heartbeat_page._STOP_CONFIRM_SECONDS = float(sys.argv[2])
print(heartbeat_page.HeartbeatPage(sys.argv[1]).should_stop(3))
"""

READS_MEMORY = """
import logging, sys
from ckpt.repository.repository import open_repository
from ckpt.tiers import previous_memory

logging.basicConfig(stream=sys.stdout, format="%(message)s")
previous_memory._ANSWER_SECONDS = 0.5
found = previous_memory.previous_memories(open_repository(sys.argv[1]))
assert [repo.steps() for repo in found] == [[0]]
"""


def start_rank(code: str, rank: int, root: Path) -> subprocess.Popen[str]:
    """Start one of two ranks, and wait until it is about to wait for the other one."""
    env = clean() | {"RANK": str(rank), "WORLD_SIZE": "2"}
    process = python(code, root, TIMEOUT_SECONDS, env=env)
    assert_is_ready(process)
    return process


def assert_is_ready(process: subprocess.Popen[str]) -> None:
    """Wait for the next line of a process."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]


def proceed(process: subprocess.Popen[str], line: str = "") -> None:
    """Let a process continue that waits for a line."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def suspend(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Stop processes for longer than their timeout, and continue them."""
    for process in processes:
        stop(process.pid)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    time.sleep(TIMEOUT_SECONDS + 1)
    for process in processes:
        process.send_signal(signal.SIGCONT)


def _wait_count(process: subprocess.Popen[str]) -> int:
    """Return how often the main thread of a process has waited."""
    found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _retries(reader: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines by which a process reports that it waits."""
    assert reader.stdout is not None
    return (line for line in reader.stdout if "retrying" in line)


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kill what a failed test has left."""
    for process in processes:
        process.kill()
        process.communicate()


def test_ranks_that_are_suspended_before_they_meet_save_afterwards(tmp_path: Path) -> None:
    ranks = [start_rank(SAVES, rank, tmp_path) for rank in range(2)]
    try:
        proceed(ranks[0])
        until(lambda: list(tmp_path.glob("meet/*/open")))
        suspend(ranks)
        proceed(ranks[1])
        for rank in ranks:
            assert_is_ready(rank)
        for rank in ranks:
            proceed(rank)
        for rank in ranks:
            finish(rank)
    finally:
        end(ranks)
    assert ckpt.open(tmp_path).steps() == [0, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_save_of_ranks_that_are_suspended_is_committed_afterwards(tmp_path: Path, first: int) -> None:
    """The rank that saves first waits for the part of the other one, or for the commit."""
    ranks = [start_rank(SAVES, rank, tmp_path) for rank in range(2)]
    try:
        for rank in ranks:
            proceed(rank)
        for rank in ranks:
            assert_is_ready(rank)
        proceed(ranks[first])
        until(lambda: list(tmp_path.glob(f"steps/1/part/{first}-*.arrow")))
        suspend(ranks)
        if first:
            suspend(ranks)  # it waits twice as long for a commit
        proceed(ranks[1 - first])
        for rank in ranks:
            finish(rank)
    finally:
        end(ranks)
    assert ckpt.open(tmp_path).steps() == [0, 1]


@pytest.mark.skipif(
    not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"), reason="no memory in common here"
)
def test_a_load_of_ranks_that_are_suspended_continues(tmp_path: Path) -> None:
    """Both ranks must run for the rendezvous, so neither waits for the other one to start."""
    env = clean() | {"WORLD_SIZE": "2"}
    ranks = [python(SHARES_A_WINDOW, tmp_path, TIMEOUT_SECONDS, env=env | {"RANK": str(rank)}) for rank in range(2)]
    try:
        for rank in ranks:
            assert_is_ready(rank)
        proceed(ranks[0])
        until((tmp_path / "waiting").exists)
        suspend(ranks)
        proceed(ranks[1])
        for rank in ranks:
            finish(rank)
    finally:
        end(ranks)


def test_a_store_call_of_a_suspended_process_still_gets_its_answer() -> None:
    process = python(CALLS_A_STORE, env={"CKPT_STORE_TIMEOUT": str(TIMEOUT_SECONDS)})
    try:
        assert_is_ready(process)
        until(lambda: len(list(Path(f"/proc/{process.pid}/task").iterdir())) > 1)
        suspend([process])
        before = _wait_count(process)  # the process finds how much time has passed, before the answer arrives
        until(lambda: process.poll() is not None or _wait_count(process) > before + 2)
        assert process.poll() is None, process.communicate()
        proceed(process, "answer")
        finish(process)
    finally:
        end([process])


def test_a_suspended_rank_still_waits_until_the_stop_is_confirmed(tmp_path: Path) -> None:
    """Another rank was past the step. If this rank had ended there, the two would save different steps."""
    page = HeartbeatPage(tmp_path / "page", new=True)
    page.request_stop(3)
    rank = python(WAITS_AT_A_STOP, page.path, TIMEOUT_SECONDS)
    try:
        until(lambda: page.read().acknowledged_stop == 3 or rank.poll() is not None)
        suspend([rank])
        before = page.read().beats
        until(lambda: page.read().beats > before + 1 or rank.poll() is not None)
        page.request_stop(9)
        assert finish(rank) == "False\n"
    finally:
        end([rank])
    page.close()


def test_a_restore_of_a_suspended_process_still_waits_for_the_memory_of_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = MemoryNodes(tmp_path / "memory", "127.0.0.1", NodeSecurity())
    try:
        until(lambda: (nodes.update(()), nodes.state == "ready")[1])
        memory, url = f"ckpt://{nodes.fresh}?redundancy=1x", tmp_path / "repo"
        monkeypatch.setenv(memory_folder.MEMORY_VARIABLE, memory)
        with ckpt.Checkpointer(url, every=None, tiers=[ckpt.Tier("memory", every=1)], group=None) as saver:
            saver.step(0, {"w": np.arange(50_000.0)})
            saver.wait()
            monkeypatch.setenv(memory_folder.PREVIOUS_MEMORY_VARIABLE, memory)
            monkeypatch.setenv(memory_folder.MEMORY_WAIT_VARIABLE, f"{TIMEOUT_SECONDS} {memory}")
            assert nodes._process is not None
            stop(nodes._process.pid)
            reader = python(READS_MEMORY, url)
            try:
                retries = _retries(reader)
                next(retries)
                suspend([reader])
                assert len([*itertools.islice(retries, 2)]) == 2, reader.communicate()
            finally:
                os.kill(nodes._process.pid, signal.SIGCONT)
            finish(reader)
    finally:
        nodes.close()
        nodes.remove()
