"""The fork server, which imports the ranks' modules and forks ranks; one file, as it runs without ckpt.

The interpreter of the ranks runs this file with the ranks' flags. Nothing of ckpt is imported before the ranks' modules.
These packages are left out, and after each the process restarts itself without it:

- a package whose import starts a thread or a process or opens an accelerator, because a fork would break it;
- a package whose import reads a variable that differs between ranks, or that the script sets before the import;
- a package that can't be imported alone.

Only installed libraries are imported, because other files may be edited between attempts.

The process reads requests from a socket and ends when it closes. A request is the length of its body, with two descriptors:
the log, and the read end of a pipe. The body is {"environ", "parent"}. The answers are lines: "ready NOTE", "pid NUMBER",
"cold REASON". A rank starts when it reads a byte from the pipe, so no rank runs that the client does not know.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

BOOTSTRAP = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); from importlib.machinery import SourceFileLoader; "
    "here = {}; exec(SourceFileLoader('fork_server', sys.argv[1]).get_code('fork_server'), here); here['main']()"
)
"""The code that the interpreter runs. Its arguments: this file, the socket, the import report (`ckpt.training.import_report`),
the packages to leave out as JSON, and the script with its arguments."""

PER_RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "CKPT_RUN", "CKPT_ATTEMPT", "CKPT_PULSE",
    "CKPT_SKIP", "CKPT_BEFORE", "CKPT_SPIKE_LIMIT", "CKPT_MTBF",
    "CKPT_MEMORY", "CKPT_MEMORY_BEFORE", "CKPT_MEMORY_WAIT",
})  # fmt: skip
"""Variables that differ between ranks or attempts."""

GO_BYTE = b"g"

_NATIVE_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_")
"""Prefixes of variables that native code reads when it is loaded. Such reads can't be observed."""
_ACCELERATOR_PREFIXES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio", "/dev/neuron")
_FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
"""Threads that their libraries restart after a fork: that of pyarrow's allocator."""
_NEVER_IMPORTED = {"mpi4py", "paddle"}
"""Importing mpi4py starts MPI. Paddle turns its dynamic mode on for the thread that imports it, and no rank has this thread."""
_MAX_LEFT_OUT = 8
"""With more packages than this to leave out, there is no warm start."""
_SET_PDEATHSIG = 1


def main() -> None:
    """Import the modules and serve requests. In each forked rank, run the script and return."""
    control = socket.socket(fileno=int(sys.argv[2]))
    without: dict[str, str] = json.loads(sys.argv[4])
    script = sys.argv[5:]
    command = [*sys.orig_argv[: -len(sys.argv) - 1], *script]  # without "-c", BOOTSTRAP and its own arguments
    if not sys.flags.safe_path:
        sys.path[:0] = [os.getcwd() if script[0] == "-m" else os.path.dirname(os.path.realpath(script[0]))]
    with open(sys.argv[3]) as file:
        import_report = json.load(file)
    stamps = _file_stamps(import_report["modules"])
    before = dict(os.environ)
    refused = _run_in_thread(lambda: _import_all(import_report["modules"], import_report["environ"], without), control)
    if refused is not None:
        package, reason = refused
        if len(without) >= _MAX_LEFT_OUT:
            _exit_not_forkable(control, f"{package}: {reason}; and {_MAX_LEFT_OUT} other packages can't be pre-imported either")
        _restart(without | {package: reason}, before)
    if not _is_single_threaded():
        _exit_not_forkable(control, "a thread was started late by one of the packages that are imported")
    for name, value in import_report["environ"].items():
        if name.startswith(_NATIVE_PREFIXES) and os.environ.get(name) != value:
            _exit_not_forkable(control, f"the script sets {name}, and libraries have read it when they are loaded")
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    _send_line(control, "ready " + "; ".join(f"without {package}: {reason}" for package, reason in without.items()))
    environ, log = _serve_forks(control, stamps)
    _become_rank(environ, log)
    os.environ.update(set_by_imports)
    sys.orig_argv[:] = command
    _run_script(script)


# --- importing -------------------------------------------------------------------------------------------------


class _ImportRefused(BaseException):
    """An import is refused. It is a BaseException so that a package does not catch it and stay half imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _LibraryFinder:
    """A meta path finder that delegates to the others.

    It refuses packages that are left out, modules that are not of an installed library, and modules that the rank has from
    another file.
    """

    def __init__(self, origins: Mapping[str, str | None], without: Mapping[str, str]) -> None:
        self._origins = origins
        self._without = without

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None:
            return None
        if name in self._without or name in _NEVER_IMPORTED:
            raise _ImportRefused(name)
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            if (spec := finder.find_spec(name, None, target)) is not None:
                if not _is_library(name, spec) or self._origins.get(name, spec.origin) != spec.origin:
                    raise _ImportRefused(name)
                return spec
        return None


def _is_library(name: str, spec: importlib.machinery.ModuleSpec) -> bool:
    if name == "ckpt" or spec.origin in ("built-in", "frozen"):
        return True
    standard = os.path.dirname(os.__file__)
    paths = [spec.origin] if spec.origin else [*(spec.submodule_search_locations or [])]
    return all(
        path.startswith(standard + os.sep) or not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep))
        for path in paths
    )


class _WatchedEnviron(os._Environ[str]):
    """The environment, which records the names of variables that are read."""

    read_names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.read_names.add(name)
        return super().__getitem__(name)


def _import_all(
    origins: Mapping[str, str | None], script_sets: Mapping[str, str | None], without: Mapping[str, str]
) -> tuple[str, str] | None:
    """Import all modules of a rank. Return a package to leave out, and why; None if all are imported.

    origins: the file of each module in the rank.
    script_sets: the variables that the script sets before it imports.
    without: the packages that are left out already.
    """
    with contextlib.suppress(OSError):  # of this thread only, because only root can raise the priority again
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    finder = _LibraryFinder(origins, without)
    plain = os.environ.__class__
    os.environ.__class__ = _WatchedEnviron
    sys.meta_path.insert(0, finder)
    try:
        for name in origins:
            package = name.partition(".")[0]
            if name in sys.modules or package in without or package in _NEVER_IMPORTED or name.startswith("__"):
                continue
            if reason := _try_import(name, package) or _find_fork_hazard() or _find_read_variable(script_sets):
                return package, reason
    finally:
        sys.meta_path.remove(finder)
        os.environ.__class__ = plain
    return None


def _try_import(name: str, package: str) -> str:
    try:
        importlib.import_module(name)
    except _ImportRefused as refused:
        return "" if refused.name == package else f"it needs {refused.name}, which is left out"
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return ""  # the rank has created this module without an import
        return f"it can't be imported alone ({type(error).__name__}: {error})"
    return ""


_SECONDS_OF_AN_ENDING_THREAD = 0.5
"""A thread that has ended is still listed until the kernel has run its end, which takes longer on a busy machine."""


def _find_fork_hazard() -> str:
    """Return what would break in a fork of this process; "" nothing."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened = os.readlink(f"/proc/self/fd/{number}")
            if opened.startswith(_ACCELERATOR_PREFIXES):
                return f"it opens {opened} when it is imported"
    if _child_pids():
        return "it starts a process when it is imported"
    if _count_threads() > 2:
        if (child := _fork()) == 0:  # threads that handle forks, as those of OpenBLAS, end before one
            os._exit(0)
        os.waitpid(child, 0)
        until = time.monotonic() + _SECONDS_OF_AN_ENDING_THREAD
        while _count_threads() > 2:
            if time.monotonic() > until:
                return "it starts a thread when it is imported"
            time.sleep(0.01)
    return ""


def _count_threads() -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm", errors="replace") as file:
            names.append(file.read().strip())
    return sum(name not in _FORK_SAFE_THREADS for name in names)


def _child_pids() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about threads, which are checked already
        return os.fork()


def _find_read_variable(script_sets: Mapping[str, str | None]) -> str:
    for name in sorted(_WatchedEnviron.read_names & (PER_RANK_VARIABLES | script_sets.keys())):
        if name in PER_RANK_VARIABLES:
            return f"it looks at {name} when it is imported"
        if os.environ.get(name) != script_sets[name]:
            return f"it looks at {name} when it is imported, which the script sets"
    return ""


def _run_in_thread(work: Callable[[], tuple[str, str] | None], control: socket.socket) -> tuple[str, str] | None:
    """Return the result of `work` in a thread, whose low priority ends with it. End the process if the client has gone."""
    results: list[tuple[str, str] | None] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    while thread.is_alive():
        if select.select([control], [], [], 0.05)[0]:
            os._exit(0)
    return results[0]


def _restart(without: Mapping[str, str], environ: Mapping[str, str]) -> NoReturn:
    for child in _child_pids():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    index = len(sys.orig_argv) - len(sys.argv) + 4  # the argument with the packages to leave out
    os.execve(sys.executable, [*sys.orig_argv[:index], json.dumps(without), *sys.orig_argv[index + 1 :]], environ)


def _is_single_threaded() -> bool:
    """Return whether this is the only thread. A joined thread may take a moment to end in the kernel."""
    until = time.monotonic() + 5
    while _count_threads() > 1 and time.monotonic() < until:
        time.sleep(0.001)
    return _count_threads() == 1


# --- serving ---------------------------------------------------------------------------------------------------


def _send_line(control: socket.socket, line: str) -> None:
    control.sendall(" ".join(line.splitlines()).encode("utf-8", "replace") + b"\n")


def _exit_not_forkable(control: socket.socket, reason: str) -> NoReturn:
    _send_line(control, f"cold {reason}")
    os._exit(0)


def _file_stamps(files: Mapping[str, str | None]) -> dict[str, tuple[int, int, int] | None]:
    """Return modification time, size and inode of each file; None if it does not exist."""
    found: dict[str, tuple[int, int, int] | None] = {}
    for path in files.values():
        if path is not None and os.sep in path:
            try:
                status = os.stat(path)
                found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
            except OSError:
                found[path] = None
    return found


def _serve_forks(control: socket.socket, stamps: Mapping[str, tuple[int, int, int] | None]) -> tuple[dict[str, str], int]:
    """Fork a rank for each request. Return only in the ranks, when they may start: their environment and log."""
    libc = ctypes.CDLL(None)
    files = {path: path for path in stamps}
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, 4, 2)
        if not head:
            os._exit(0)
        request = json.loads(_receive_exactly(control, struct.unpack("I", head)[0]))
        log, go_read = descriptors
        changed = next((path for path, stamp in _file_stamps(files).items() if stamp != stamps[path]), None)
        if changed is not None:
            _exit_not_forkable(control, f"{changed} has changed")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        libc.fflush(None)
        pid = _fork_orphan()
        if pid == 0:
            control.close()
            if os.read(go_read, 1) != GO_BYTE:
                os._exit(1)
            libc.prctl(_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != request["parent"]:
                os._exit(1)
            os.close(go_read)
            return request["environ"], log
        os.close(log)
        os.close(go_read)
        if pid < 0:
            _exit_not_forkable(control, "a process can't be forked")
        _send_line(control, f"pid {pid}")


def _receive_exactly(control: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        received = control.recv(nbytes - len(data))
        if not received:
            os._exit(0)
        data += received
    return bytes(data)


def _fork_orphan() -> int:
    """Fork a rank in a session of its own. Return its process id; 0 in the rank; -1 if it can't be forked.

    It forks twice, so that the rank becomes a child of the process that adopts orphans.
    """
    pid_read, pid_write = os.pipe()
    try:
        intermediate = _fork()
    except OSError:
        return -1
    if intermediate == 0:
        os.close(pid_read)
        try:
            if _fork():
                os._exit(0)
        except OSError:
            os._exit(1)
        os.setsid()  # before the client knows the rank, because it ends ranks by their sessions
        os.write(pid_write, struct.pack("i", os.getpid()))
        os.close(pid_write)
        return 0
    os.close(pid_write)
    pid_bytes = os.read(pid_read, 4)
    os.close(pid_read)
    os.waitpid(intermediate, 0)  # the rank is adopted only after this process has ended
    return int(struct.unpack("i", pid_bytes)[0]) if pid_bytes else -1


# --- in a rank -------------------------------------------------------------------------------------------------


def _become_rank(environ: Mapping[str, str], log: int) -> None:
    """Make this process equal to one that was started with this environment and log."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(environ)
    if "numpy.random" in sys.modules:  # each rank needs random numbers of its own; `random` reseeds itself after a fork
        sys.modules["numpy.random"].seed()
    if "torch.random" in sys.modules:
        sys.modules["torch.random"].default_generator.seed()
    if "ckpt.training.heartbeat_page" in sys.modules:
        sys.modules["ckpt.training.heartbeat_page"].reset_after_fork()
    if "ckpt.adapters.adapt.startup.hooks" in sys.modules:  # of `ckpt-run --adapt`
        sys.modules["ckpt.adapters.adapt.startup.hooks"].start_process()
    importlib.invalidate_caches()


def _run_script(script: list[str]) -> None:
    """Run the script as `python` does. Tracebacks do not show the frames of this file."""
    module: Any = sys.modules["__main__"]
    for name in [name for name in vars(module) if not name.startswith("__")]:
        delattr(module, name)
    try:
        if script[0] == "-m":
            import runpy

            sys.argv[:] = ["-m", *script[2:]]
            runpy._run_module_as_main(script[1])  # type: ignore[attr-defined]
        else:
            sys.argv[:] = script
            path = os.path.join(os.getcwd(), script[0])
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            module.__file__, module.__cached__, module.__loader__ = path, None, loader
            exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = _trim_traceback(sys.excepthook)
        raise


def _trim_traceback(hook: Callable[..., object]) -> Callable[..., None]:
    hidden_files = {_run_script.__code__.co_filename, "<string>"}

    def trimmed_hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in hidden_files:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return trimmed_hook
