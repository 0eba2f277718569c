"""A sweep of a folder that is a member without a node deletes the temporary files of killed writers, and of no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.nodes import directories

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair, scrub
from ckpt.storage.base.errors import StoreError
from ckpt.storage.member.device import Device
from ckpt.storage.testing import random_bytes

DATA = random_bytes(300_000)

KILLED = """
import os, signal, sys
from ckpt.storage.member.device import Device
writer = Device(sys.argv[1]).store.create("killed")
writer.append(memoryview(bytes(100_000)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def make_old(folder: Path) -> list[Path]:
    """Let all files of objects look as if they were written two hours ago, and return them."""
    found = [path for path in folder.rglob("*") if path.is_file() and "objects" in path.parts]
    for path in found:
        os.utime(path, (time.time() - 7200,) * 2)
    return found


def test_a_repair_spares_the_file_of_a_writer_that_pauses_for_long(tmp_path: Path) -> None:
    """A mounted file may be open for hours."""
    writing, other = (Namespace(directories(tmp_path, 3, redundancy="2x")) for _ in range(2))
    with writing.create("a", aligned=False) as writer:
        writer.append(memoryview(DATA))
        assert len(make_old(tmp_path)) == 2
        repair.repair_namespace(other, scrub.scrub_namespace(other))
        writer.append(memoryview(DATA))
        writer.commit()
    assert other.get("a") == DATA + DATA
    for each in (writing, other):
        each.close()


def test_the_file_of_a_killed_writer_is_swept(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=600, check=False)
    (left,) = make_old(tmp_path)
    Device(tmp_path).sweep(10_000)
    assert left.exists()
    Device(tmp_path).sweep(3600)
    assert not left.exists()


def test_a_member_that_can_not_be_swept_stops_neither_the_repair_nor_other_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = Namespace(directories(tmp_path, 3, redundancy="2x"))
    namespace.put("a", DATA)
    for i in range(3):
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / f"disk{i}")], timeout=600, check=False)
    left = [path for path in make_old(tmp_path) if path.name.startswith(".")]
    assert len(left) == 3

    def failing(_: float) -> None:
        raise StoreError("listing failed: too many open files")

    monkeypatch.setattr(namespace.open_members["disk0"]._device, "sweep", failing)
    assert not repair.repair_namespace(namespace, scrub.scrub_namespace(namespace)).failed
    assert [path for path in left if path.exists()] == [path for path in left if "disk0" in path.parts]
    assert "unfinished objects of killed writers stay on disk0: listing failed: too many open files" in caplog.text
    namespace.close()
