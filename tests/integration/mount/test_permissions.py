"""Permissions in a mounted namespace that other users can reach."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.mounts import unmount, wait_until_mounted
from helpers.nodes import NodeProcess

_FUSE = os.path.exists("/dev/fuse") and shutil.which("fusermount3") is not None
pytestmark = pytest.mark.skipif(not _FUSE or os.getuid() != 0, reason="needs /dev/fuse, fusermount3, and root for another user")

_OTHER = 65534


def _as_other(*command: str, group: int = _OTHER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, user=_OTHER, group=group, extra_groups=[], capture_output=True, text=True, cwd="/")


@contextmanager
def _mounted(*options: str) -> Iterator[Path]:
    """Yield an empty namespace, mounted with --allow-other, in a folder that every user can reach."""
    pytest.importorskip("fuse")
    base = Path(tempfile.mkdtemp(prefix="ckpt-test-"))
    base.chmod(0o755)
    node = NodeProcess(base / "node")
    folder = base / "mnt"
    folder.mkdir()
    command = [sys.executable, "-m", "ckpt.tools.mount", "--allow-other", *options]
    process = subprocess.Popen([*command, f"ckpt://{node.address}/?redundancy=1x", str(folder)])
    try:
        wait_until_mounted(folder, process)
        yield folder
    finally:
        unmount(folder)
        process.wait(600)
        node.close()
        shutil.rmtree(base)


def test_other_users_can_read_but_neither_write_nor_delete() -> None:
    with _mounted() as folder:
        (folder / "a").write_bytes(b"mine")
        assert _as_other("cat", str(folder / "a")).stdout == "mine"
        for attempt in (
            ["rm", "-f", str(folder / "a")], ["sh", "-c", f"echo x > {folder}/a"], ["sh", "-c", f"echo x >> {folder}/a"],
            ["mv", str(folder / "a"), str(folder / "b")], ["touch", str(folder / "new")], ["mkdir", str(folder / "d")],
            ["chmod", "777", str(folder / "a")],
        ):  # fmt: skip
            refused = _as_other(*attempt)
            assert refused.returncode != 0, attempt
            assert "ermi" in refused.stderr, (attempt, refused.stderr)  # "Permission denied", "Operation not permitted"
        assert (folder / "a").read_bytes() == b"mine"
        assert os.listdir(folder) == ["a"]


def test_owner_group_and_mode_are_those_of_the_options() -> None:
    with _mounted("--uid", "12", "--gid", "34", "--umask", "007") as folder:
        (folder / "a").write_bytes(b"mine")
        (folder / "d").mkdir()
        for name, mode in (("a", 0o660), ("d", 0o770), (".", 0o770)):
            found = (folder / name).stat()
            assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12, 34, mode)
        assert "ermi" in _as_other("cat", str(folder / "a")).stderr
        assert _as_other("cat", str(folder / "a"), group=34).stdout == "mine"
        assert _as_other("touch", str(folder / "new"), group=34).returncode == 0
