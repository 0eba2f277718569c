"""Shared by the tests: states that a step number determines, what a repository holds on disk, processes that get killed.

A state made by `state_of(step)` has leaves that change at every step, at every third, and never, in blocks of their
own, so that saving a row of steps writes some blocks and refers to others.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.format import json_records
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.base.store import Entry, Reader, Store, Writer

TESTS = Path(__file__).parent
SOAK = os.environ.get("CKPT_SOAK") == "1"


# --- states ----------------------------------------------------------------------------------------------------


def state_of(step: int, size: int = 5000) -> dict[str, Any]:
    """The state of a step. Each element size is a block of its own: one that never changes, one slow, two fast."""
    fast = np.random.default_rng(step)
    slow = np.random.default_rng(1000 + step // 3)
    never = np.random.default_rng(7)
    return {
        "step": step,
        "name": f"step {step}",
        "embed": never.integers(0, 255, 2 * size, dtype=np.uint8),
        "slow": {"a": slow.integers(0, 999, size, dtype=np.int16), "b": slow.integers(0, 9, (3, 5), dtype=np.int16)},
        "model": [fast.standard_normal(size, dtype=np.float32), np.float32(step) / 3],
        "moments": (fast.standard_normal((size // 10, 7)), np.arange(step, step + 9.0), np.zeros((0, 4))),
    }


def write_into(state: Any, other: Any) -> Any:
    """Give `state` the values of `other`, its arrays in place, as a training step does."""
    if isinstance(state, np.ndarray):
        state[...] = other
        return state
    if isinstance(state, dict):
        for key in state:
            state[key] = write_into(state[key], other[key])
        return state
    if isinstance(state, list):
        state[:] = [write_into(a, b) for a, b in zip(state, other, strict=True)]
        return state
    if isinstance(state, tuple):
        return tuple(write_into(a, b) for a, b in zip(state, other, strict=True))
    return other


def differences(got: Any, want: Any, path: str = "state") -> list[str]:
    """Where two states differ in type, shape or any bit."""
    if type(got) is not type(want):
        return [f"{path}: {type(got).__name__} instead of {type(want).__name__}"]
    if isinstance(want, dict):
        if list(got) != list(want):
            return [f"{path}: keys {list(got)} instead of {list(want)}"]
        return [d for k in want for d in differences(got[k], want[k], f"{path}.{k}")]
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return [f"{path}: {len(got)} entries instead of {len(want)}"]
        return [d for i, (a, b) in enumerate(zip(got, want, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    if isinstance(want, (np.ndarray, np.generic)):
        same = got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()
        return [] if same else [f"{path}: other bytes"]
    return [] if got == want else [f"{path}: {got!r} instead of {want!r}"]


def assert_same(got: Any, want: Any) -> None:
    """Fail unless two states are equal bit for bit."""
    found = differences(got, want)
    assert not found, "; ".join(found[:5])


# --- what is on disk -------------------------------------------------------------------------------------------


def files(root: str | os.PathLike[str]) -> set[str]:
    """Every file below a folder, hidden and temporary ones too."""
    return {os.path.relpath(os.path.join(base, name), root) for base, _, names in os.walk(root) for name in names}


def snapshot(root: str | os.PathLike[str]) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {name: Path(root, name).read_bytes() for name in files(root)}


def reachable(root: str | os.PathLike[str]) -> set[str]:
    """The files below steps/ that commit records name, and the records."""
    found = set()
    for path in Path(root).glob("steps/*/commit.json"):
        commit = json_records.decode_commit(path.read_bytes(), str(path))
        found.add(os.path.relpath(path, root))
        found.update(f.name for f in (*commit.manifests, *commit.trees, *commit.packs))
    return found


def assert_clean(root: str | os.PathLike[str], folders: bool = True) -> None:
    """Fail unless a repository holds exactly what its commit records need: no left-overs, nothing missing.

    folders: nor empty folders, which a failed save may leave until the repository is opened for writing again.
    """
    here = files(root)
    steps = {name for name in here if name.startswith("steps/")}
    assert steps == reachable(root)
    assert not [name for name in here if os.path.basename(name).startswith(".")], "temporary files are left"
    empty = [base for base, below, names in os.walk(root) if not below and not names]
    assert not (folders and empty), f"empty folders are left: {empty}"
    rest = here - steps
    assert {name.partition("/")[0] for name in rest} <= {"ckpt.json", "generations", "lines"}


def assert_all_load(root: str | os.PathLike[str], acknowledged: int | None = None) -> list[int]:
    """Every listed step loads bit for bit, and the newest is at least the acknowledged one. Returns the steps."""
    try:
        steps = ckpt.open(root).steps()
    except ckpt.StepNotFound:
        assert acknowledged is None
        return []  # died before the repository was made
    assert acknowledged is None or (steps and steps[-1] >= acknowledged), (steps, acknowledged)
    for step in steps:
        assert_same(ckpt.load(root, step=step), state_of(step))
        assert ckpt.open(root)[step].verify() > 0
    if steps:
        assert_same(ckpt.load(root, strict=True), state_of(steps[-1]))
    return steps


def one_line(error: BaseException | pytest_info, *words: str) -> str:
    """The message of an error: one line that holds all `words`."""
    text = str(getattr(error, "value", error))
    assert "\n" not in text, text
    assert len(text) > 20, text
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    return text


pytest_info = Any


@contextmanager
def failing(spec: str) -> Iterator[None]:
    """Fail points of this process, off again at the end."""
    set_failpoints(spec)
    try:
        yield
    finally:
        set_failpoints("")


@contextmanager
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A new folder in memory where the system has such, for tests of many saves that need no disk; else `tmp_path`."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-test-", dir="/dev/shm") as folder:
        yield Path(folder)


# --- processes -------------------------------------------------------------------------------------------------


def _path() -> str:
    return os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))


def python(code: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    """Start a Python process that runs `code` with the tests on its path, talking by lines."""
    env = {**os.environ, "PYTHONPATH": _path(), **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float = 60) -> str:
    """Wait for a process to end well; return what it printed."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out


class Killer:
    """A server that has ckpt imported and forks a saving child for each job, which it may kill. See kill_server.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "kill_server.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": _path()},
        )  # fmt: skip

    def run(self, **job: Any) -> dict[str, Any]:
        """Run one job; its answer has `acknowledged` (steps), `killed` (bool) and `error` (text, "" where none)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


# --- a store that fails ----------------------------------------------------------------------------------------


class Injected(StoreError):
    """The failure that a FailingStore was told to make."""


class FailingStore(Store):
    """Passes all calls on to another store; the `at`-th call of `method` fails, before or after it took effect.

    Methods of writers and readers count as "append", "commit", "read_into". The URL is that of the store below.
    """

    def __init__(self, inner: Store, method: str = "", at: int = 0, after: bool = False) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls: dict[str, int] = {}
        self.failed = False
        self._method = method
        self._at = at
        self._after = after

    def call(self, name: str, work: Any) -> Any:
        """Count one call and do it, or fail."""
        count = self.calls[name] = self.calls.get(name, 0) + 1
        hit = name == self._method and count == self._at
        if hit and not self._after:
            self.failed = True
            raise Injected(f"injected: call {count} of {name} on {self.url}")
        result = work()
        if hit:
            self.failed = True
            raise Injected(f"injected: answer {count} of {name} on {self.url} got lost")
        return result

    def put(self, name: str, data: Any) -> None:
        self.call("put", lambda: self.inner.put(name, data))

    def put_new(self, name: str, data: Any) -> None:
        self.call("put_new", lambda: self.inner.put_new(name, data))

    def get(self, name: str) -> bytes:
        return self.call("get", lambda: self.inner.get(name))  # type: ignore[no-any-return]

    def open(self, name: str) -> Reader:
        return _FailingReader(self, self.call("open", lambda: self.inner.open(name)))

    def create(self, name: str, size_hint: int = 0) -> Writer:
        return _FailingWriter(self, self.call("create", lambda: self.inner.create(name, size_hint)))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return iter(self.call("list", lambda: [*self.inner.list(prefix)]))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        return iter(self.call("list_folders", lambda: [*self.inner.list_folders(prefix)]))

    def delete(self, names: Any) -> None:
        names = [*names]
        self.call("delete", lambda: self.inner.delete(names))

    def exists(self, name: str) -> bool:
        return self.call("exists", lambda: self.inner.exists(name))  # type: ignore[no-any-return]

    def sweep_temporaries(self, prefix: str) -> None:
        self.call("sweep_temporaries", lambda: self.inner.sweep_temporaries(prefix))


class _FailingWriter(Writer):
    def __init__(self, store: FailingStore, inner: Writer) -> None:
        self._store, self._inner = store, inner

    def append(self, data: memoryview) -> int:
        return self._store.call("append", lambda: self._inner.append(data))  # type: ignore[no-any-return]

    def commit(self) -> int:
        return self._store.call("commit", self._inner.commit)  # type: ignore[no-any-return]

    def abort(self) -> None:
        self._inner.abort()


class _FailingReader(Reader):
    def __init__(self, store: FailingStore, inner: Reader) -> None:
        self._store, self._inner = store, inner

    def read_into(self, position: int, buffer: memoryview) -> int:
        return self._store.call("read_into", lambda: self._inner.read_into(position, buffer))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._inner.close()


def drop_cache(*files: Path) -> None:
    """Make the next reading of these come from the disk.

    A page that the kernel is moving at this moment (compaction of memory) is not dropped: so this is repeated. Files of a
    file system that is all in memory stay.
    """
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            for _ in range(100):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if not any(cached_pages(file)):
                    break
                time.sleep(0.01)


def bypasses_cache(files: Sequence[Path], read: Callable[[], object], is_left: Callable[[], bool]) -> bool:
    """Whether a read of these files from the disk leaves their pages out of the page cache.

    To ask whether a page is in the page cache makes Linux read it. About once in a thousand times that ends before the
    answer, which then is yes, and the read goes through the page cache: so there are three tries.
    """
    for _ in range(3):
        drop_cache(*files)
        read()
        if not is_left():
            return True
    return False


def is_cached(file: Path, position: int) -> bool:
    """Whether the page of this byte is in the page cache."""
    return cached_pages(file)[position // mmap.PAGESIZE]


def cached_pages(file: Path) -> list[bool]:
    """For each page of a file whether it is in the page cache: by mincore(2), which reads nothing, as preadv(2) would."""
    nbytes = file.stat().st_size
    if not nbytes:
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    with file.open("rb") as opened:
        address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), 0)
        assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        try:
            assert libc.mincore(address, nbytes, pages) == 0, os.strerror(ctypes.get_errno())
        finally:
            libc.munmap(address, nbytes)
    return [bool(page & 1) for page in pages]


def until(true: Callable[[], object]) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def no_fuse() -> str | None:
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


def check_on_torch_ranks(program: str, size: int, root: Path, *checks: str) -> None:
    """Run checks of a program beside this file in one launch of torchrun; each rank must come to the end of each."""
    kept = {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|OMPI_|PMI|SLURM_|TORCHELASTIC", k)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    process = subprocess.Popen(
        [*launcher, str(TESTS / program), str(root), *checks],
        env=kept | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out + err[-6000:]
    assert len([json.loads(line) for line in re.findall(r"\{.*?\}", out)]) == size * len(checks), out
