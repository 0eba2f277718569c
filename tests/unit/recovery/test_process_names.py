"""Processes of this host may have any name: the kernel cuts it at 15 bytes, in the middle of a character if need be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ckpt.groups.process_identity import process_start_ticks
from ckpt.recovery.ranks import processes

NAMED = """
import sys, time
with open("/proc/self/comm", "wb") as file:
    file.write(b"tra) in \\xd0")
print(flush=True)
time.sleep(1000)
"""


@pytest.fixture(name="named")
def fixture_named() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process with a name that is not UTF-8."""
    process = subprocess.Popen(
        [sys.executable, "-c", NAMED], stdout=subprocess.PIPE, start_new_session=True, env=os.environ | {"CKPT_TEST_NAME": "1"}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    with open(f"/proc/{process.pid}/comm", "rb") as file:
        assert b"\xd0" in file.read()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_process_with_any_name_is_found_and_described(named: subprocess.Popen[bytes]) -> None:
    assert processes.process_state(named.pid) in ("S", "R")
    assert processes.find_processes([named.pid]) == [named.pid]
    assert processes.find_processes([], "CKPT_TEST_NAME=1") == [named.pid]
    assert process_start_ticks(named.pid).isdigit()
