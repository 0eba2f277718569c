"""A store that fails: full, forbidden, failing to make durable, failing at any call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.failing_store import FailingStore, failing
from helpers.folders import fast_folder
from helpers.messages import one_line
from helpers.processes import SOAK, finish, python
from helpers.repositories import assert_all_load, assert_clean, files
from helpers.states import assert_same, state_of, write_into

import ckpt
from ckpt.storage.local.directory import LocalStore

METHODS = (
    "put", "put_new", "get", "open", "create", "list", "list_folders", "delete", "exists", "sweep_temporaries",
    "append", "commit", "read_into",
)  # fmt: skip


def save(url: Any, step: int, mode: str, **options: Any) -> None:
    """Save `state_of(step)` and wait for it. `small` stages in pieces, with back-pressure."""
    memory = 64 << 10 if mode == "small" else None
    saved = ckpt.save(state_of(step), url, step, keep=2, memory=memory, blocking=mode == "blocking", **options)
    if mode != "blocking":
        saved.result()


def try_save(url: Any, step: int, mode: str) -> ckpt.CkptError | None:
    """Save; the CkptError if that failed. Any other exception is a failure of the test."""
    try:
        save(url, step, mode)
    except ckpt.CkptError as error:
        return error
    return None


def check_failed(root: Path, before: list[int], step: int, error: ckpt.CkptError | None) -> bool:
    """What must hold after a save of `step` that may have failed; returns whether the step is there after all."""
    steps = assert_all_load(root)
    assert steps in (before, before[-1:] + [step], [*before, step][-2:], [*before, step]), steps
    if error is not None:
        one_line(error)
    else:
        assert step in steps
    return step in steps


def retry(root: Path, step: int, mode: str) -> None:
    """The next save works: of the same step, or of the one after it where only the answer got lost."""
    if step in ckpt.open(root).steps():
        with pytest.raises(ckpt.AlreadyExists) as told:
            save(root, step, mode)
        one_line(told, str(step), "overwrite")
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
def test_any_call_fails(fast: Path, method: str, mode: str) -> None:
    """The first call of a method fails, in the next try the second, … until a save meets no failure."""
    step = 2
    for after in (False, True):
        for at in range(1, 100):
            save(fast, step - 2, mode, overwrite=True)
            save(fast, step - 1, mode, overwrite=True)
            before = [step - 2, step - 1]
            store = FailingStore(LocalStore(fast), method, at, after)
            error = try_save(store, step, mode)
            there = check_failed(fast, before, step, error)
            step += 3
            if not store.failed:
                assert error is None
                break
            assert error is not None or there
            retry(fast, step - 3, mode)
        assert at > 1 or store.calls.get(method, 0) == 0, f"{method} is called and never failed"


def test_every_method_is_called(tmp_path: Path) -> None:
    """Else the test above proves nothing of it."""
    store = FailingStore(LocalStore(tmp_path))
    for step in range(4):
        save(store, step, "blocking")
        ckpt.load(store)
    assert {m for m in METHODS if not store.calls.get(m)} <= {"exists"}


def test_a_new_repository_on_a_failing_store(tmp_path: Path) -> None:
    """Also where nothing is there yet; a Checkpointer tells as it opens."""
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
def test_injected_system_errors(fast: Path, point: str, mode: str) -> None:
    """EIO from fsync is never retried: the file fails, and the save with it."""
    step = 2
    name, _, kind = point.partition("=")
    for at in range(1, 100) if SOAK else (1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 15):
        save(fast, step - 2, mode, overwrite=True)
        save(fast, step - 1, mode, overwrite=True)
        with failing(f"{point}@{at}"):
            error = try_save(fast, step, mode)
        there = check_failed(fast, [step - 2, step - 1], step, error)
        if error is not None:
            advice = "full" if kind == "full" and name.startswith("local") else "fail"
            one_line(error, advice)
            assert isinstance(error, ckpt.StoreError)
        else:
            assert there
        retry(fast, step, mode)
        step += 3


def test_a_failed_save_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """In a Checkpointer the error comes with the next call, and the loop can go on."""
    with ckpt.Checkpointer(tmp_path, every=1, keep=2) as saver:
        state = state_of(0)
        for step in range(3):
            saver.step(step, write_into(state, state_of(step)))
            saver.wait()
        with failing("local.append=full@1"):
            saver.step(3, write_into(state, state_of(3)))
            with pytest.raises(ckpt.SaveFailed) as told:
                saver.wait()
        one_line(told, "step 3", "full")
        assert isinstance(told.value.__cause__, ckpt.StoreError)
        assert assert_all_load(tmp_path) == [1, 2]
        saver.step(3, state)
    assert assert_all_load(tmp_path) == [2, 3]
    assert_clean(tmp_path, folders=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 6 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root on Linux")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "ckpt-test", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("mode", ["blocking", "async", "small"])
def test_disk_full(small_disk: Path, mode: str) -> None:
    root = small_disk / "run"
    save(root, 0, mode)
    save(root, 1, mode)
    filler = small_disk / "filler"
    for step in range(2, 12):
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        # From no room at all to nearly enough: it gets full at the claim, the pack, the manifest or the record.
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


def test_disk_too_small_for_the_state(small_disk: Path) -> None:
    """Space is reserved first, so that a large state fails before its first byte is written."""
    root = small_disk / "run"
    save(root, 0, "blocking")
    before = files(root)
    big = {"w": state_of(1, 4_000_000)}
    for blocking in (True, False):
        with pytest.raises(ckpt.StoreError) as told:
            handle = ckpt.save(big, root, 1, blocking=blocking)
            handle.result()
        one_line(told, "full", "free space or keep fewer steps")
        assert {n for n in files(root) if n.startswith("steps")} == {n for n in before if n.startswith("steps")}
    retry(root, 1, "blocking")


AS_NOBODY = """
import os, sys, tempfile, ckpt
from helpers.states import state_of
with tempfile.TemporaryDirectory() as warm:  # imports everything: nobody may not read the library
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


@pytest.mark.parametrize("where", ["", "generations", "steps"])
@pytest.mark.parametrize("how", ["blocking", "async", "load"])
def test_permission_denied(tmp_path_factory: pytest.TempPathFactory, how: str, where: str) -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    # Not below pytest's own folder, which nobody may enter.
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
        forbidden = root / where
        os.chown(forbidden, 0, 0)
        forbidden.chmod(0o700)
        out = finish(python(AS_NOBODY, root, how))
        if (how, where) == ("load", "generations"):
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
def test_file_size_limit(tmp_path: Path, limit: int) -> None:
    """EFBIG, and SIGXFSZ ignored as Python does: an error like any other."""
    code = """
import resource, sys, ckpt
from helpers.states import state_of
ckpt.save(state_of(0), sys.argv[1], 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    ckpt.save(state_of(1), sys.argv[1], 1)
except ckpt.StoreError as error:
    print("told", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ckpt.save(state_of(2), sys.argv[1], 2, keep=2)
"""
    if sys.platform != "linux":
        pytest.skip("limits of file sizes are set as on Linux")
    out = finish(python(code, tmp_path, limit))
    assert out.startswith("told"), out
    assert assert_all_load(tmp_path) == [0, 2]
    assert_clean(tmp_path)
