"""A process that can open no more files: what it can't read now does not count as missing, damaged or unusable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_a_save_without_descriptors_makes_no_framework_unusable(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = """
import os, resource, sys
from pathlib import Path
import ckpt
ckpt.save({"w": 1}, Path(sys.argv[1], "first"), step=0)  # imports all else that a save needs
import torch

free = os.dup(0)
os.close(free)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
for more in range(6):
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, limits[1]))
    try:
        ckpt.save({"w": torch.ones(3)}, Path(sys.argv[1], f"full{more}"), step=0)
    except (OSError, ckpt.CkptError):
        pass
    else:
        assert more, "the save needs no descriptors"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
ckpt.save({"w": torch.ones(3)}, Path(sys.argv[1], "run"), step=0)
assert ckpt.load(Path(sys.argv[1], "run"))["w"].tolist() == [1, 1, 1]
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


def _run_without_descriptors(code: str, *args: str) -> None:
    """Run a program in which `few_descriptors()` is a context without a free file descriptor."""
    before = """
import contextlib, os, resource, sys

@contextlib.contextmanager
def few_descriptors():
    free = os.dup(0)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield limits
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
"""
    command = [sys.executable, "-c", before + code, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def test_processes_that_cannot_be_listed_now_are_not_taken_for_ended() -> None:
    """The next attempt may begin only when no process of this one lives, also in a session of its own."""
    _run_without_descriptors("""
import subprocess, threading
from ckpt.recovery.ranks import process_kill, processes

name = f"CKPT_TEST_MARK_{os.getpid()}"
mark = f"{name}=1"
escaped = subprocess.Popen(["sleep", "600"], start_new_session=True, env={**os.environ, name: "1"}, stderr=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL)
while processes.find_processes([], mark) != [escaped.pid]:  # /proc has its environment a moment after exec has begun
    pass
with few_descriptors() as limits:
    assert processes.process_state(escaped.pid) == "?"
    timer = threading.Timer(0.5, resource.setrlimit, (resource.RLIMIT_NOFILE, limits))
    timer.start()
    process_kill.kill_sessions([], mark)
assert processes.process_state(escaped.pid) in ("", "Z")
""")


def test_files_of_a_hook_that_cannot_be_listed_now_are_not_left_out(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"1")
    _run_without_descriptors(
        """
import errno
from ckpt.adapters.accelerate_hooks import _read_files
assert [name for name, _ in _read_files(sys.argv[1])] == ["below/file"]
with few_descriptors():
    try:
        found = list(_read_files(sys.argv[1]))
    except OSError as error:
        assert error.errno == errno.EMFILE
    else:
        sys.exit(f"no error: {found}")
""",
        str(tmp_path),
    )


def test_an_import_tries_zstandard_again() -> None:
    _run_without_descriptors("""
from ckpt.format import float_planes
with few_descriptors(), contextlib.suppress(OSError):
    float_planes._zstandard()
assert float_planes._zstandard() is not None
""")


def test_a_folder_of_megatron_that_cannot_be_read_now_is_not_imported_as_one_of_dcp(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    _run_without_descriptors(
        """
from pathlib import Path
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_megatron import is_megatron
assert is_megatron(Path(sys.argv[1]))
with few_descriptors():
    try:
        found = is_megatron(Path(sys.argv[1]))
    except CkptError as error:
        assert "too many files open" in str(error)
    else:
        sys.exit(f"no error: {found}")
""",
        str(tmp_path),
    )


def test_a_sweep_that_can_not_list_a_folder_fails(tmp_path: Path) -> None:
    """The temporary files of killed writers would otherwise stay as long as this process runs."""
    _run_without_descriptors(
        """
from ckpt.storage.base.errors import StoreError
from ckpt.storage.local.directory import LocalStore

store = LocalStore(sys.argv[1])
store.put("steps/1/a", b"a")
writer = store.create("steps/1/b")
writer.append(memoryview(b"b"))
folder = os.path.join(sys.argv[1], "steps/1")
assert len(os.listdir(folder)) == 2
with few_descriptors():
    try:
        store.sweep_temporaries("steps")
    except StoreError as error:
        assert "listing" in str(error), error
    else:
        raise AssertionError("it did nothing")
store.sweep_temporaries("steps")
assert os.listdir(folder) == ["a"]
""", str(tmp_path)
    )  # fmt: skip


def test_a_sweep_of_a_member_that_can_not_list_a_folder_fails(tmp_path: Path) -> None:
    """Otherwise nothing says that the temporary files of killed writers stay."""
    _run_without_descriptors(
        """
import time
from ckpt.storage.base.errors import StoreError
from ckpt.storage.member.device import Device

device = Device(sys.argv[1])
device.store.create("a/b").append(memoryview(b"b"))  # closed, and not locked, once it is garbage
folder = os.path.join(device.store.root, "a")
(left,) = os.listdir(folder)
os.utime(os.path.join(folder, left), (time.time() - 7200,) * 2)
with few_descriptors():
    try:
        device.sweep(3600)
    except StoreError as error:
        assert "listing" in str(error), error
    else:
        raise AssertionError("it did nothing")
device.sweep(3600)
assert os.listdir(folder) == []
""", str(tmp_path)
    )  # fmt: skip
