"""The ranks of an attempt end with all their descendants, also with one that begins at this moment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.mounts import unmount, wait_until_mounted, why_no_fuse

from ckpt.recovery.ranks import process_kill, processes

_MARK = "CKPT_TEST_BEGINNING"


@pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")
def test_a_descendant_in_the_middle_of_exec_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until exec has ended, /proc shows no environment of the process, so its mark can't be read."""
    monkeypatch.setattr(processes, "_EXEC_SECONDS", 300.0)
    below, folder = tmp_path / "below", tmp_path / "mount"
    below.mkdir()
    folder.mkdir()
    bash = shutil.which("bash")
    assert bash is not None
    shutil.copy(bash, below / "bash")
    server = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "slow_end_mount.py"), str(below), str(folder), str(tmp_path / "go")]
    )
    try:
        wait_until_mounted(folder, server)
        value = f"{_MARK}={tmp_path}"
        environment = dict([value.split("=", 1)], PATH=os.environ["PATH"])
        with subprocess.Popen(
            [folder / "bash", "-c", "sleep 600 & wait"], start_new_session=True, env=environment
        ) as descendant:
            try:
                assert not Path(f"/proc/{descendant.pid}/cmdline").read_bytes(), "exec has ended already"
                threading.Timer(0.5, (tmp_path / "go").touch).start()
                process_kill.kill_sessions([], value)
                assert processes.process_state(descendant.pid) in ("", "Z")
            finally:
                (tmp_path / "go").touch()
                with suppress(ProcessLookupError):  # it was reaped with the other orphans
                    os.killpg(descendant.pid, 9)
    finally:
        server.kill()
        server.wait()
        unmount(folder)
