"""ckpt-restore to a full disk and to a read-only file system: one line with the reason, and no file is left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.restored_files import ENDINGS, left_in, run
from helpers.small_disks import small_disk as small_disk

import ckpt

FORMATS = [*(f".{ending}" for ending in ENDINGS), "hf"]


@pytest.fixture(scope="module", name="large_step")
def save_large_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with one step of 4 MiB, in two arrays."""
    root = tmp_path_factory.mktemp("repository") / "run"
    ckpt.save({f"w{n}": np.random.default_rng(n).standard_normal(1 << 18) for n in range(2)}, root, step=3)
    return root


def restored(root: Path, folder: Path, form: str) -> subprocess.CompletedProcess[str]:
    """Return the result of ckpt-restore to a file or a folder `out` in `folder`."""
    return run(root, folder / "out", "--hf") if form == "hf" else run(root, folder / f"out{form}")


@pytest.mark.parametrize("form", FORMATS)
def test_a_really_full_disk_is_reported_in_one_line(form: str, large_step: Path, small_disk: Path) -> None:
    failed = restored(large_step, small_disk, form)
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count("\n") == 1, failed.stderr
    assert f"{small_disk}/out" in failed.stderr
    assert "the disk is full: free space" in failed.stderr
    assert left_in(small_disk) == []


@pytest.mark.parametrize("form", FORMATS)
def test_a_read_only_file_system_is_named_with_the_destination(form: str, large_step: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    failed = restored(large_step, small_disk, form)
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count("\n") == 1, failed.stderr
    assert failed.stderr.startswith(f"ckpt-restore: {small_disk}/out"), failed.stderr
    assert "could not be written: " in failed.stderr
    assert "; mount the file system writable, or name another folder" in failed.stderr
    assert left_in(small_disk) == []
