"""The namespace as a mounted directory, with the programs that people use on one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Process

from ckpt.storage.testing import pattern


def _fuse() -> str | None:
    """Why nothing can be mounted here, if so."""
    if not os.path.exists("/dev/fuse") or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse that this user may open"
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        return "no fusermount: install fuse3"
    try:
        import fuse  # noqa: F401
    except (ImportError, OSError) as error:
        return f"no libfuse: {error}"
    return None


pytestmark = pytest.mark.skipif(_fuse() is not None, reason=_fuse() or "")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    nodes = [Process(tmp_path / f"n{i}") for i in range(3)]
    folder = tmp_path / "mnt"
    folder.mkdir()
    url = f"ckpt://{','.join(n.address for n in nodes)}/"
    command = [sys.executable, "-m", "ckpt.tools.mount", url, str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not os.path.ismount(folder):
        if process.poll() is not None or time.monotonic() > until:
            assert process.stderr is not None
            process.kill()
            pytest.fail(f"not mounted: {process.stderr.read()}")
        time.sleep(0.05)
    yield folder
    subprocess.run([shutil.which("fusermount3") or "fusermount", "-uz", str(folder)], check=False)
    process.wait(30)
    for node in nodes:
        node.close()


def test_programs(mount: Path, tmp_path: Path) -> None:
    data = pattern(19_000_001)
    (tmp_path / "x").write_bytes(data)
    subprocess.run(["cp", str(tmp_path / "x"), str(mount / "a")], check=True)
    assert (mount / "a").read_bytes() == data
    assert (mount / "a").stat().st_size == len(data)
    (mount / "d" / "e").mkdir(parents=True)
    subprocess.run(["cp", "-r", str(mount / "a"), str(mount / "d" / "e" / "b")], check=True)
    subprocess.run(["mv", str(mount / "d"), str(mount / "moved")], check=True)
    assert sorted(os.listdir(mount)) == ["a", "moved"]
    assert (mount / "moved" / "e" / "b").read_bytes() == data
    subprocess.run(["sh", "-c", f"echo one > {mount}/log; echo two >> {mount}/log"], check=True)
    assert (mount / "log").read_text() == "one\ntwo\n"
    archive = tmp_path / "all.tar"
    subprocess.run(["tar", "-cf", str(archive), "-C", str(mount), "."], check=True)
    subprocess.run(["rm", "-r", str(mount / "moved")], check=True)
    assert sorted(os.listdir(mount)) == ["a", "log"]
    (mount / "new").mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(mount / "new")], check=True)
    assert (mount / "new" / "moved" / "e" / "b").read_bytes() == data


def test_what_is_refused(mount: Path) -> None:
    (mount / "a").write_bytes(b"hello")
    with pytest.raises(OSError, match="not supported") as refused, open(mount / "a", "r+b") as file:
        file.write(b"x")
    assert refused.value.errno == errno.EOPNOTSUPP
    assert (mount / "a").read_bytes() == b"hello"
    with pytest.raises(FileNotFoundError):
        (mount / "none").read_bytes()
    with pytest.raises(OSError, match="not supported"):
        os.truncate(mount / "a", 3)
    with pytest.raises(FileExistsError):
        (mount / "a").mkdir()
    (mount / "d").mkdir()
    (mount / "d" / "x").write_bytes(b"")
    with pytest.raises(OSError, match="not empty"):
        (mount / "d").rmdir()


def test_checkpoints_through_it(mount: Path) -> None:
    import numpy as np

    import ckpt

    state = {"w": np.arange(3_000_000.0)}
    ckpt.save(state, mount / "run", 1)
    assert np.array_equal(ckpt.load(mount / "run")["w"], state["w"])

