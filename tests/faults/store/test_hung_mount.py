"""A mount that hangs: asynchronous saves keep the training thread out of calls that can't be interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.mounts import unmount, wait_until_mounted, why_no_fuse

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")

# The program waits until the server is stopped. A server that reads one more request and stops before it answers makes
# the process that asks unkillable, which is a limit of FUSE.
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import ckpt

signal.signal(signal.SIGINT, signal.default_int_handler)
url, server = sys.argv[1], int(sys.argv[2])
state = {"weight": np.arange(4_000_000)}

def hang():
    os.kill(server, signal.SIGSTOP)
    while open(f"/proc/{server}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    print("mount hangs", flush=True)
"""

CONTINUES_TO_SAVE = """
saver = ckpt.Checkpointer(url, every=None)
saver.save(1, state, blocking=True)
hang()
try:
    for step in range(2, 9):
        state["weight"] = state["weight"] + 1
        saver.save(step, state)
except ckpt.CkptError as error:
    print("raised", error, flush=True)
    raise SystemExit(3)
"""
CLOSES = """
with ckpt.Checkpointer(url, every=None) as saver:
    saver.save(1, state, blocking=True)
    hang()
    state["weight"] = state["weight"] + 1
    saver.save(2, state)
"""
ENDS = """
saver = ckpt.Checkpointer(url, every=None)
saver.save(1, state, blocking=True)
hang()
state["weight"] = state["weight"] + 1
saver.save(2, state)
"""
OPENS = """
hang()
ckpt.Checkpointer(url, every=None)
"""
READS_THE_RESULT = """
saver = ckpt.Checkpointer(url, every=None)
saver.save(1, state, blocking=True)
hang()
state["weight"] = state["weight"] + 1
saver.save(2, state).result()
"""
SAVES_IN_BACKGROUND = """
handle = ckpt.save(state, url, step=1)
hang()
ckpt.save(state, url, step=2, blocking=False)
"""
TIERS = """
saver = ckpt.Checkpointer(url, every=None, tiers=[ckpt.Tier(sys.argv[3])])
saver.save(1, state, blocking=True)
saver.wait()
hang()
state["weight"] = state["weight"] + 1
with saver:
    saver.save(2, state)
"""
JOBS = {
    "continues to save": CONTINUES_TO_SAVE,
    "closes": CLOSES,
    "ends": ENDS,
    "opens": OPENS,
    "reads the result": READS_THE_RESULT,
    "saves in the background": SAVES_IN_BACKGROUND,
    "tiers": TIERS,
}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Yield a mounted folder and the process that serves it."""
    below, folder = tmp_path / "below", tmp_path / "mount"
    below.mkdir()
    folder.mkdir()
    server = subprocess.Popen([sys.executable, str(PROGRAMS / "passthrough_mount.py"), str(below), str(folder)])
    try:
        wait_until_mounted(folder, server)
        yield folder, server
    finally:
        server.kill()
        server.wait()
        unmount(folder)


def start_program(
    code: str, mount: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path, seconds: float
) -> subprocess.Popen[str]:
    """Start a program on the mount, with this timeout of the store, and wait until its mount hangs."""
    folder, server = mount
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + code, str(folder / "run"), str(server.pid), str(tmp_path / "near")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "CKPT_STORE_TIMEOUT": str(seconds)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "mount hangs\n"
    return process


@pytest.mark.parametrize("code", JOBS.values(), ids=JOBS)
def test_a_program_on_a_hung_mount_ends_with_an_error(
    mount: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path, code: str
) -> None:
    process = start_program(code, mount, tmp_path, 1.5)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == (1 if code in (CLOSES, OPENS, READS_THE_RESULT, SAVES_IN_BACKGROUND, TIERS) else 120), (
        out,
        err,
    )
    assert "CKPT_STORE_TIMEOUT" in out + err
    assert "1.5 s" in out + err


@pytest.mark.parametrize("code", [OPENS, CONTINUES_TO_SAVE, TIERS], ids=["opens", "continues to save", "tiers"])
def test_an_interrupt_ends_a_program_on_a_hung_mount(
    mount: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path, code: str
) -> None:
    process = start_program(code, mount, tmp_path, 600)
    try:
        time.sleep(0.5)  # the program waits by then; where it does not yet, the interrupt ends it, too
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:  # the program waits once more at its exit
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.poll() is not None
    finally:
        process.kill()
        out, err = process.communicate()
    assert "KeyboardInterrupt" in err, (out, err)


def test_a_mount_that_answers_again_loses_no_step(mount: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    import ckpt

    folder, server = mount
    process = start_program(CLOSES, mount, tmp_path, 600)
    try:
        time.sleep(0.5)
        server.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, (out, err)
    assert ckpt.open(folder / "run").steps() == [1, 2]
