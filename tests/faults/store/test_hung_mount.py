"""A mount that hangs: asynchronous saves keep the training thread out of calls that can't be interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.mounts import no_fuse

pytestmark = pytest.mark.skipif(no_fuse() is not None, reason=no_fuse() or "")

PROGRAM = """
import os, signal, sys, threading
import numpy as np
import ckpt

signal.signal(signal.SIGINT, signal.default_int_handler)
url, server = sys.argv[1], int(sys.argv[2])
state = {"weight": np.arange(4_000_000)}

def hang():
    os.kill(server, signal.SIGSTOP)
    print("hangs", flush=True)
"""

SAVES_ON = """
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
ASKS = """
saver = ckpt.Checkpointer(url, every=None)
saver.save(1, state, blocking=True)
hang()
state["weight"] = state["weight"] + 1
saver.save(2, state).result()
"""
REFUSES = """
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
    "saves on": SAVES_ON,
    "closes": CLOSES,
    "ends": ENDS,
    "opens": OPENS,
    "asks": ASKS,
    "refuses": REFUSES,
    "tiers": TIERS,
}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    below, folder = tmp_path / "below", tmp_path / "mount"
    below.mkdir()
    folder.mkdir()
    server = subprocess.Popen([sys.executable, str(PROGRAMS / "passthrough_mount.py"), str(below), str(folder)])
    try:
        until = time.monotonic() + 60
        while not os.path.ismount(folder):
            assert server.poll() is None
            assert time.monotonic() < until, "not mounted"
            time.sleep(0.05)
        yield folder, server
    finally:
        server.kill()
        server.wait()
        subprocess.run([shutil.which("fusermount3") or "fusermount", "-uz", str(folder)], check=False)


def start(code: str, mount: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    folder, server = mount
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + code, str(folder / "run"), str(server.pid), str(tmp_path / "near")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "CKPT_STORE_TIMEOUT": str(seconds)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    return process


@pytest.mark.parametrize("code", JOBS.values(), ids=JOBS)
def test_the_program_ends_with_an_error(mount: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path, code: str) -> None:
    process = start(code, mount, tmp_path, 1.5)
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == (1 if code in (CLOSES, OPENS, ASKS, REFUSES, TIERS) else 120), (out, err)
    assert "CKPT_STORE_TIMEOUT" in out + err
    assert "1.5 s" in out + err


@pytest.mark.parametrize("code", [OPENS, SAVES_ON, TIERS], ids=["opens", "saves on", "tiers"])
def test_an_interrupt_ends_the_program(mount: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path, code: str) -> None:
    process = start(code, mount, tmp_path, 600)
    try:
        time.sleep(0.5)  # the program waits by now; where it does not yet, the interrupt ends it all the same
        until = time.monotonic() + 100
        while process.poll() is None and time.monotonic() < until:  # at its exit it waits once more
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
    process = start(CLOSES, mount, tmp_path, 600)
    try:
        time.sleep(0.5)
        server.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, (out, err)
    assert ckpt.open(folder / "run").steps() == [1, 2]
