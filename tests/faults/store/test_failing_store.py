"""A store that fails: full, without permission, failing to make data durable, failing at any call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.failing_store import FailingStore, Injected, failing
from helpers.folders import fast_folder
from helpers.messages import one_line
from helpers.processes import SOAK, finish, python
from helpers.repositories import assert_all_load, assert_clean, files
from helpers.states import assert_same, state_of, write_into

import ckpt
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore

METHODS = (
    "put", "put_new", "get", "open", "create", "list", "list_folders", "delete", "exists", "sweep_temporaries",
    "append", "commit", "read_into",
)  # fmt: skip


def save(url: Any, step: int, mode: str, **options: Any) -> None:
    """Save `state_of(step)` and wait for it. Mode `small` stages the state in parts, with back-pressure."""
    memory = 64 << 10 if mode == "small" else None
    saved = ckpt.save(state_of(step), url, step, keep=2, memory=memory, blocking=mode == "blocking", **options)
    if mode != "blocking":
        saved.result()


def try_save(url: Any, step: int, mode: str) -> ckpt.CkptError | None:
    """Save, and return the CkptError if that failed. Any other exception fails the test."""
    try:
        save(url, step, mode)
    except ckpt.CkptError as error:
        return error
    return None


def check_failed(root: Path, before: list[int], step: int, error: ckpt.CkptError | None) -> bool:
    """Check all conditions after a save of `step` that may have failed; return whether the step exists after all."""
    steps = assert_all_load(root)
    assert steps in (before, before[-1:] + [step], [*before, step][-2:], [*before, step]), steps
    if error is not None:
        one_line(error)
    else:
        assert step in steps
    return step in steps


def retry(root: Path, step: int, mode: str) -> None:
    """Check that the next save works: of the same step, or of the one after it where only the reply was lost."""
    if step in ckpt.open(root).steps():
        with pytest.raises(ckpt.AlreadyExists) as error:
            save(root, step, mode)
        one_line(error, str(step), "overwrite")
        step += 1
    save(root, step, mode)
    assert_all_load(root, step)
    assert_clean(root)


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("mode", ["blocking", "async", "small"])
@pytest.mark.parametrize("method", METHODS)
def test_a_save_survives_a_failure_of_any_call(fast: Path, method: str, mode: str) -> None:
    """The first call of a method fails, in the next try the second, and so on, until a save meets no failure."""
    step = 2
    for after in (False, True):
        for at in range(1, 100):
            save(fast, step - 2, mode, overwrite=True)
            save(fast, step - 1, mode, overwrite=True)
            before = [step - 2, step - 1]
            store = FailingStore(LocalStore(fast), method, at, after)
            error = try_save(store, step, mode)
            exists = check_failed(fast, before, step, error)
            step += 3
            if not store.failed:
                assert error is None
                break
            assert error is not None or exists
            retry(fast, step - 3, mode)
        assert at > 1 or store.calls.get(method, 0) == 0, f"{method} is called and has never failed"


class _WithoutMemory(FailingStore):
    """From the `at`-th call on, every call fails: the first one as `first`, later ones with MemoryError."""

    def __init__(self, inner: Store, at: int, first: Exception) -> None:
        super().__init__(inner)
        self._count, self._fails_from, self._first = 0, at, first

    def call(self, name: str, work: Any) -> Any:
        self._count += 1
        if self._count < self._fails_from:
            return super().call(name, work)
        if not self.failed:
            self.failed = True
            raise self._first
        raise MemoryError


@pytest.mark.parametrize(
    ("mode", "first"),
    [("blocking", Injected("injected")), ("async", MemoryError()), ("small", RuntimeError("can't start new thread"))],
)
def test_a_save_without_memory_ends(fast: Path, mode: str, first: Exception) -> None:
    """Its waiting caller gets an error, also if the calls after a failure fail, by which the attempt is ended."""
    save(fast, 0, mode)
    for at in range(1, 200):
        before = ckpt.open(fast).steps()
        store = _WithoutMemory(LocalStore(fast), at, first)
        error: BaseException | None = None
        try:
            save(store, at, mode)
        except (ckpt.CkptError, MemoryError, RuntimeError) as failed:
            error = failed
        assert not isinstance(error, ckpt.SaveFailed), "the save made no progress"
        assert_all_load(fast)
        if not store.failed:
            assert error is None
            break
        assert error is not None or at in ckpt.open(fast).steps()
        assert set(before[-1:]) <= set(ckpt.open(fast).steps())
        save(fast, at, mode, overwrite=True)
        assert_all_load(fast, at)
    assert at > 10


def test_a_save_and_a_load_call_every_method(tmp_path: Path) -> None:
    """Otherwise the test above proves nothing about a method."""
    store = FailingStore(LocalStore(tmp_path))
    for step in range(4):
        save(store, step, "blocking")
        ckpt.load(store)
    assert {m for m in METHODS if not store.calls.get(m)} <= {"exists"}


def test_a_failure_while_a_repository_is_created_is_reported(tmp_path: Path) -> None:
    """A Checkpointer on a new repository raises the error when it opens."""
    for method in ("get", "list", "put_new", "create", "put"):
        for at in range(1, 20):
            root = tmp_path / f"{method}{at}"
            store = FailingStore(LocalStore(root), method, at)
            try:
                with ckpt.Checkpointer(store, every=1) as saver:
                    saver.step(0, state_of(0))
            except ckpt.CkptError as error:
                one_line(error)
            if not store.failed:
                break
            save(root, 1, "blocking")
            assert_all_load(root, 1)
            assert_clean(root)
        assert at > 1


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["blocking", "async"])
@pytest.mark.parametrize("point", ["local.fsync=error", "local.rename=error", "local.append=full", "save.manifest=full"])
def test_a_system_error_fails_the_save_and_the_next_one_works(fast: Path, point: str, mode: str) -> None:
    """EIO from fsync is never retried: the file fails, and the save with it."""
    step = 2
    name, _, kind = point.partition("=")
    for at in range(1, 100) if SOAK else (1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 15):
        save(fast, step - 2, mode, overwrite=True)
        save(fast, step - 1, mode, overwrite=True)
        with failing(f"{point}@{at}"):
            error = try_save(fast, step, mode)
        exists = check_failed(fast, [step - 2, step - 1], step, error)
        if error is not None:
            advice = "full" if kind == "full" and name.startswith("local") else "fail"
            one_line(error, advice)
            assert isinstance(error, ckpt.StoreError)
        else:
            assert exists
        retry(fast, step, mode)
        step += 3


def test_a_failed_save_changes_no_other_step(tmp_path: Path) -> None:
    """A Checkpointer raises the error in its next call, and the loop can continue."""
    with ckpt.Checkpointer(tmp_path, every=1, keep=2) as saver:
        state = state_of(0)
        for step in range(3):
            saver.step(step, write_into(state, state_of(step)))
            saver.wait()
        with failing("local.append=full@1"):
            saver.step(3, write_into(state, state_of(3)))
            with pytest.raises(ckpt.SaveFailed) as error:
                saver.wait()
        one_line(error, "step 3", "full")
        assert isinstance(error.value.__cause__, ckpt.StoreError)
        assert assert_all_load(tmp_path) == [1, 2]
        saver.step(3, state)
    assert assert_all_load(tmp_path) == [2, 3]
    assert_clean(tmp_path, folders=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a tmpfs of 6 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root on Linux")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "ckpt-test", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted on this host: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("mode", ["blocking", "async", "small"])
def test_a_save_to_a_full_disk_fails_and_the_next_one_works(small_disk: Path, mode: str) -> None:
    root = small_disk / "run"
    save(root, 0, mode)
    save(root, 1, mode)
    filler = small_disk / "filler"
    for step in range(2, 12):
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        # From no room to nearly enough: the disk gets full at the writer lease, the pack, the manifest or the commit record.
        room = (0, 4096, 8192, 16384, 20480, 32768, 36864, 40960, 45056, 49152)[step - 2]
        filler.write_bytes(bytes(max(0, free - room)))
        before = ckpt.open(root).steps()
        error = try_save(root, step, mode)
        if error is not None:
            assert isinstance(error, ckpt.StoreError)
            one_line(error, "full", str(root))
        check_failed(root, before, step, error)
        filler.unlink()
        if error is not None:
            retry(root, step, mode)
    assert_clean(root)


def test_a_state_larger_than_the_disk_fails_before_its_first_byte(small_disk: Path) -> None:
    """Space is reserved first, so no byte of a large state is written."""
    root = small_disk / "run"
    save(root, 0, "blocking")
    before = files(root)
    big = {"w": state_of(1, 4_000_000)}
    for blocking in (True, False):
        with pytest.raises(ckpt.StoreError) as error:
            handle = ckpt.save(big, root, 1, blocking=blocking)
            handle.result()
        one_line(error, "full", "free space or keep fewer steps")
        assert {n for n in files(root) if n.startswith("steps")} == {n for n in before if n.startswith("steps")}
    retry(root, 1, "blocking")


AS_NOBODY = """
import os, sys, tempfile, ckpt
from helpers.states import state_of
with tempfile.TemporaryDirectory() as warm:  # imports everything, as the user nobody may not read the library
    ckpt.load(ckpt.save(state_of(1), warm).store)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
url, how = sys.argv[1:]
try:
    if how == "load":
        ckpt.load(url)
    else:
        saved = ckpt.save(state_of(1), url, 1, blocking=how == "blocking")
        saved.result() if how == "async" else None
    print("done")
except ckpt.CkptError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("forbidden_folder", ["", "generations", "steps"])
@pytest.mark.parametrize("how", ["blocking", "async", "load"])
def test_a_save_or_load_without_permission_is_refused(
    tmp_path_factory: pytest.TempPathFactory, how: str, forbidden_folder: str
) -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    # Not below the folder of pytest, which the user nobody may not enter.
    base = Path(subprocess.check_output(["mktemp", "-d", "/tmp/ckpt-test-XXXXXX"], text=True).strip())
    try:
        base.chmod(0o755)
        root = base / "run"
        ckpt.save(state_of(0), root, 0, codec="none")
        for folder, _, names in os.walk(root):
            os.chown(folder, 65534, 65534)
            for name in names:
                os.chown(Path(folder, name), 65534, 65534)
        before = files(root)
        forbidden = root / forbidden_folder
        os.chown(forbidden, 0, 0)
        forbidden.chmod(0o700)
        out = finish(python(AS_NOBODY, root, how))
        if (how, forbidden_folder) == ("load", "generations"):
            assert out == "done\n"
        else:
            assert out.startswith("Refused ")
            one_line(out.rstrip("\n"), "Permission denied", str(root))
        assert {n for n in files(root) if "generations" not in n} == {n for n in before if "generations" not in n}
        assert_same(ckpt.load(root, step=0), state_of(0))
        ckpt.save(state_of(1), root, 1)
        assert_all_load(root, 1)
        assert_clean(root)
    finally:
        subprocess.run(["rm", "-rf", base], check=True)


@pytest.mark.parametrize("limit", [20_000, 60_000])
def test_a_file_size_limit_fails_the_save_and_the_next_one_works(tmp_path: Path, limit: int) -> None:
    """Python ignores SIGXFSZ, so the write fails with EFBIG: an error like any other."""
    code = """
import resource, sys, ckpt
from helpers.states import state_of
ckpt.save(state_of(0), sys.argv[1], 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    ckpt.save(state_of(1), sys.argv[1], 1)
except ckpt.StoreError as error:
    print("raised", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ckpt.save(state_of(2), sys.argv[1], 2, keep=2)
"""
    if sys.platform != "linux":
        pytest.skip("limits of file sizes are set as on Linux")
    out = finish(python(code, tmp_path, limit))
    assert out.startswith("raised"), out
    assert assert_all_load(tmp_path) == [0, 2]
    assert_clean(tmp_path)
