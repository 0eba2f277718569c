"""A network file system whose reads fail for a while (EIO), as one that is mounted `soft` and has lost its server.

That is not a sign of damage: the bytes are read again later. On a disk of this host, the same error is a bad sector.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.mounts import unmount, wait_until_mounted, why_no_fuse
from helpers.states import assert_same, state_of

import ckpt
from ckpt.errors import StoreError
from ckpt.repository.lease_records import generation_name
from ckpt.repository.writer_lease import acquire_lease
from ckpt.storage.base.errors import is_damage

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in which reads fail of files whose names end with one in the file `failing` next to it."""
    below, folder = tmp_path / "below", tmp_path / "mount"
    below.mkdir()
    folder.mkdir()
    command = [sys.executable, str(PROGRAMS / "failing_mount.py"), str(below), str(folder), str(tmp_path / "failing")]
    server = subprocess.Popen(command)
    try:
        wait_until_mounted(folder, server)
        yield folder
    finally:
        server.kill()
        server.wait()
        unmount(folder)


@pytest.mark.parametrize("failing", ["0-1-1-0.pack", "2/commit.json", "0-1-1.parquet"])
def test_a_load_does_not_fall_back_from_a_step_that_is_temporarily_unreadable(mount: Path, failing: str) -> None:
    """It would continue the training from an older step, although nothing is lost."""
    url = mount / "run"
    with ckpt.Checkpointer(url, every=None, group=None) as saver:
        for step in (1, 2):
            saver.save(step, state_of(step), blocking=True)
    assert [*url.rglob(f"*{failing.rpartition('/')[2]}")], "no file has this name"
    (mount.parent / "failing").write_text(failing)
    with pytest.raises(StoreError) as error:
        ckpt.load(url)
    assert not is_damage(error.value)
    assert "try again" in str(error.value)
    (mount.parent / "failing").unlink()
    assert_same(ckpt.load(url), state_of(2))


def test_a_lease_whose_record_is_temporarily_unreadable_is_not_taken_over(mount: Path) -> None:
    url = mount / "run"
    ckpt.save(state_of(1), url, 1, group=None)
    repo = ckpt.open(url)
    acquire_lease(repo)
    (mount.parent / "failing").write_text(generation_name(2))
    with pytest.raises(StoreError, match="Input/output error"):
        acquire_lease(repo)
    (mount.parent / "failing").unlink()
    assert acquire_lease(repo).generation == 3
