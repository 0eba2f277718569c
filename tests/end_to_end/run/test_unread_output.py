"""ckpt-run continues if nobody reads its output: a stopped reader of a pipe, a hung ssh session, a terminal after Ctrl-S."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers.faulty_runs import RUN
from helpers.processes import until
from helpers.runs import Run, assert_result
from helpers.runs import start as start
from helpers.small_disks import small_disk as small_disk
from helpers.unread_pipe import full_pipe


def test_a_killed_rank_starts_again_although_nobody_reads_the_messages(start: Callable[..., Run]) -> None:
    with full_pipe() as (_, unread):
        run = start("--show", "all", steps=100, stdout=unread, stderr=unread)
        run.until_step(12)
        os.kill(run.pid(1), signal.SIGKILL)
        assert run.end() == 0
    assert_result(run, 100)
    assert run.failures() == [("signal", [1])]


PRINTS = """
import os, sys, time
for i in range(4000):
    print("x" * 60, i)
print("END", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""


@contextmanager
def printing_run(folder: Path, stdout: int, stderr: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    """A context with a run whose rank prints 260 kB, and waits for the file `go`. It must end with success."""
    command = [*RUN, "--run-dir", str(folder / "run"), "--", sys.executable, "-c", PRINTS, str(folder / "go")]
    with subprocess.Popen(command, stdout=stdout, stderr=stderr) as agent:
        try:
            yield agent
        finally:
            (folder / "go").touch()
            assert agent.wait(600) == 0


def test_a_pipe_that_does_not_block_gets_all_output(tmp_path: Path) -> None:
    """Another program that shares a terminal or pipe may have set O_NONBLOCK."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with open(read_end, "rb") as reader, printing_run(tmp_path, write_end):
        until(lambda: not select.select([], [write_end], [], 0)[1], "the pipe is full")
        os.close(write_end)
        for number in range(4000):
            assert reader.readline() == f"{'x' * 60} {number}\n".encode()
        assert reader.readline() == b"END\n"


def test_output_to_a_disk_that_was_full_for_a_while_continues(tmp_path: Path, small_disk: Path) -> None:
    filler, out = small_disk / "filler", small_disk / "out"
    out.touch()
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with open(out, "ab") as file, printing_run(tmp_path, file.fileno()):
        log = tmp_path / "run" / "logs" / "0" / "rank-0.log"
        until(lambda: log.exists() and b"END" in log.read_bytes())
        time.sleep(1)  # the output fails meanwhile
        filler.unlink()
        until(lambda: b"END" in out.read_bytes())
    assert out.read_bytes() == log.read_bytes(), "nothing is missing, and nothing is twice there"
