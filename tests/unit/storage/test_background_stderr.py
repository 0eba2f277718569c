"""A thread writes the standard error of a process. The end of the process waits for it, but at most a second."""

from __future__ import annotations

import os
import subprocess
import sys

from helpers.unread_pipe import full_pipe

PROGRAM = """
import logging, os, sys
from ckpt.storage.base.background_stderr import write_stderr_in_background
write_stderr_in_background()
for i in range(1000):
    print("line", i, file=sys.stderr)
logging.getLogger("ckpt").warning("logged")
if (pid := os.fork()) == 0:
    print("child", file=sys.stderr)
    os._exit(0)
os.waitpid(pid, 0)
raise ValueError("the last one")
"""


def test_all_messages_are_written_before_the_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("line")] == [f"line {i}" for i in range(1000)]
    assert {"logged", "child", "ValueError: the last one"} <= set(lines)


def test_a_process_ends_although_nobody_reads_its_messages() -> None:
    program = PROGRAM.replace("os.fork()", "1").replace("os.waitpid(pid, 0)", "")
    with full_pipe() as (_, unread):
        done = subprocess.run([sys.executable, "-c", program], stderr=unread, timeout=600, check=False)
    assert done.returncode == 1


def test_messages_to_a_pipe_that_does_not_block_wait_for_the_reader() -> None:
    """Another program that shares a terminal or pipe may have set O_NONBLOCK."""
    program = PROGRAM.replace("range(1000)", "range(20_000)").replace("os.fork()", "1").replace("os.waitpid(pid, 0)", "")
    program = program.replace(
        'raise ValueError("the last one")', "import time; time.sleep(1); print(flush=True); sys.stdin.read()"
    )
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with (
        open(read_end, "rb") as reader,
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=write_end
        ) as process,
    ):
        os.close(write_end)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # the thread has tried to write for a while
        lines = [reader.readline()]
        while lines[-1] not in (b"line 19999\n", b""):
            lines.append(reader.readline())
        process.stdin.close()
        reader.read()
    numbers = [int(line.removeprefix(b"line ")) for line in lines]
    assert numbers == sorted(set(numbers)), "lines may be left out as a whole, where there are too many"
    assert len(numbers) >= 10_000
