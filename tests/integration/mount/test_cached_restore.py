"""A restore from a network file system reads what is in the page cache of this host from there."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers.mounts import wait_until_mounted, why_no_fuse

import ckpt
from ckpt.storage.base.errors import IntegrityError
from ckpt.storage.local.directory import LocalStore

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "slow_mount.py"

pytestmark = [
    pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or ""),
    pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (6, 5), reason="cachestat(2) is missing"),
]


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*.pack"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def mapped(folder: Path) -> Iterator[None]:
    """Map all packs, as a reader may: the kernel, short of memory, takes pages that no process has mapped first."""
    with ExitStack() as files:
        for path in folder.rglob("*.pack"):
            file = files.enter_context(path.open("rb"))
            pages = files.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            assert len({pages[at] for at in range(0, len(pages), mmap.PAGESIZE)}) > 1  # each page is touched
        yield


def test_reads_of_a_fuse_mount(tmp_path: Path) -> None:
    behind, mountpoint = tmp_path / "behind", tmp_path / "mount"
    behind.mkdir()
    mountpoint.mkdir()
    state = {"w": np.random.default_rng(0).integers(0, 1 << 64, 4 << 20, np.uint64)}
    like = {"w": np.zeros_like(state["w"])}
    with subprocess.Popen([sys.executable, str(PROGRAM), str(behind), str(mountpoint), "--delay-ms=0"]) as server:
        try:
            wait_until_mounted(mountpoint, server)
            assert LocalStore(mountpoint / "not" / "yet" / "made").parallel_reads == 8
            assert LocalStore(behind).parallel_reads == 4
            ckpt.save(state, mountpoint, step=1, codec="none")
            drop_cache(mountpoint)
            ckpt.load(mountpoint, like=like)  # through the page cache
            with mapped(mountpoint):
                for pack in behind.rglob("*.pack"):
                    before = pack.stat()
                    with pack.open("r+b") as file:
                        file.write(bytes(before.st_size))
                    # Otherwise the kernel drops what it has cached when it next looks, which is after a second.
                    os.utime(pack, ns=(before.st_atime_ns, before.st_mtime_ns))
                like["w"][:] = 0
                ckpt.Checkpointer(mountpoint).restore(like)
                assert np.array_equal(like["w"], state["w"])
            drop_cache(mountpoint)
            with pytest.raises(IntegrityError):
                ckpt.Checkpointer(mountpoint).restore(like)
        finally:
            subprocess.run(["fusermount3", "-u", str(mountpoint)], check=False)
            if server.poll() is None:
                server.terminate()
