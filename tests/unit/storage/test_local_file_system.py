"""SQLite files are allowed on local file systems only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base import file_system_kind
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.file_system_kind import LOCAL_FILE_SYSTEMS_VARIABLE, _file_system_type, require_local_file_system
from ckpt.storage.registers.sqlite import SqliteRegisters

NETWORK = [0x6969, 0xFF534D42, 0xFE534D42, 0x0BD00BD0, 0x47504653, 0x01021997, 0x00C36400, 0x19830326, 0x65735546, 0x123456]


def test_the_disk_of_the_tests_is_local(tmp_path: Path) -> None:
    require_local_file_system(tmp_path / "not" / "made", "a log", "move")
    assert _file_system_type("/proc") == 0x9FA0


@pytest.mark.parametrize("kind", NETWORK)
def test_run_logs_and_registers_are_refused_on_network_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    monkeypatch.setattr(file_system_kind, "_file_system_type", lambda folder: kind)
    with pytest.raises(StoreError, match="etcd://"):
        SqliteRunLog(tmp_path / "run")
    with pytest.raises(StoreError, match="serve it with ckpt-node"):
        SqliteRegisters(str(tmp_path / "registers.sqlite")).mark_complete()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(LOCAL_FILE_SYSTEMS_VARIABLE, f"/elsewhere:{tmp_path}")
    SqliteRunLog(tmp_path / "run").close()
    SqliteRegisters(str(tmp_path / "registers.sqlite")).mark_complete()


MOUNT = """
import os, stat, sys
from fuse import FUSE, FuseOSError, Operations
class Empty(Operations):
    def getattr(self, path, fh=None):
        if path != "/":
            raise FuseOSError(2)
        return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
FUSE(Empty(), sys.argv[1], foreground=True)
"""


def test_a_run_log_on_a_fuse_mount_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("fuse")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("FUSE is not available on this machine")
    folder = tmp_path / "mount"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", MOUNT, str(folder)], stderr=subprocess.PIPE)
    try:
        while not os.path.ismount(folder):
            if process.poll() is not None:
                pytest.skip(f"FUSE is not available on this machine: {process.stderr and process.stderr.read()!r}")
            time.sleep(0.02)
        with pytest.raises(StoreError, match="on FUSE, perhaps of a network"):
            SqliteRunLog(folder / "run")
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(folder)], check=False)
        process.wait(600)
