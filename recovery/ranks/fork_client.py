"""The client of the fork server, for warm starts: ranks are forked from a process with their modules imported.

A new interpreter needs seconds to import torch, but a fork of a process that has imported it needs milliseconds. A command
that can't be started warm is started cold, as without this file. `ForkServers` raises nothing, except `fork` if a log can't be
written; `ForkServerClient.reason` contains why there is no warm start. Only the main thread uses this file, because processes
that are started here end with the thread that started them (`process_kill.die_with_parent`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import struct
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from ckpt.recovery.ranks import fork_server, process_kill, processes
from ckpt.training import import_report

log = logging.getLogger("ckpt.run")

PYTHON_NAME = re.compile(r"python(\d+(\.\d+)*)?[dt]?")
"""The file name of a Python interpreter."""

_PYTHON_FLAGS = frozenset("bBdEIOPqRsSuv")
_FORK_SECONDS = 5.0
"""The longest wait for an answer of the fork server. After that a cold start is faster, even on a busy host."""


class NotForkable(Exception):
    """A command can't be started warm. The message contains why."""


class ScriptNotFound(NotForkable):
    """A command can't be started cold either, because its script does not exist."""


def split_python_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the interpreter with its flags, and the script with its arguments.

    `python -u train.py --lr 1` becomes (python -u) and (train.py --lr 1). A module becomes (-m, module, …). Raises NotForkable.
    """
    if not PYTHON_NAME.fullmatch(os.path.basename(command[0])):
        raise NotForkable(f"{command[0]} is not python")
    at, flags = 1, [command[0]]
    while at < len(command) and command[at].startswith("-"):
        argument = command[at]
        for index, letter in enumerate(argument[1:], 1):
            rest = argument[index + 1 :]
            if letter == "m" and (rest or at + 1 < len(command)):
                before = [argument[:index]] if index > 1 else []
                return [*flags, *before], ["-m", *([rest] if rest else []), *command[at + 1 :]]
            if letter in "WX":
                if not rest:
                    flags.append(argument)
                    at, argument = at + 1, "".join(command[at + 1 : at + 2])
                break
            if letter not in _PYTHON_FLAGS:
                raise NotForkable(f"python {argument} runs no script")
        else:
            if len(argument) == 1:
                raise NotForkable("the script is read from the standard input")
        flags.append(argument)
        at += 1
    if at >= len(command):
        raise NotForkable("python is given no script")
    script = command[at]
    if not os.path.exists(script):
        raise ScriptNotFound(f"there is no {script} here")
    if not os.path.isfile(script) or script.endswith(".pyc") or zipfile.is_zipfile(script):
        raise NotForkable(f"{script} is not a file of Python source")
    return flags, [*command[at:]]


class ForkedRank:
    """A forked rank, with the part of the interface of subprocess.Popen that this package uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        process_kill.register_child(pid)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the rank runs."""
        return self._wait_status(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the rank and return its exit status."""
        status = self._wait_status(0)
        assert status is not None
        return status

    def _wait_status(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # other code has reaped it, so the status is lost: assume a failure
                pid, status = self.pid, 255 << 8
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServerClient:
    """The client of one fork server, which forks ranks of one command until `close`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.reason = ""
        """Why there is no warm start; empty while one is possible."""
        self.note = ""
        """The packages that are not pre-imported, and why."""
        self._environ = _shared_environ(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()
        self._control, self._server_socket = socket.socketpair()
        self._received = b""
        self._ready = False

    @classmethod
    def start(cls, command: Sequence[str], environ: Mapping[str, str], imports: Path) -> Self:
        """Start a fork server at low priority and return its client.

        This process becomes the one that adopts orphans, so the forked ranks become its children.

        command: the command of the ranks.
        environ: the environment of a rank.
        imports: the import report of a rank (`ckpt.training.import_report`), which the fork server reads at its start.

        Raises OSError if too many files are open, or no temporary file can be made. Other failures are in `reason`.
        """
        client = cls(environ)
        try:
            flags, script = split_python_command(command)
        except NotForkable as error:
            client._shut_down(str(error))
            return client
        process_kill.adopt_orphans()
        control = client._server_socket.fileno()
        arguments = [fork_server.BOOTSTRAP, fork_server.__file__, str(control), str(imports), "{}"]
        try:
            client._process = subprocess.Popen(
                [*flags, "-c", *arguments, *script], stdin=subprocess.DEVNULL, stdout=client._output, stderr=client._output,
                env=client._environ, start_new_session=True, pass_fds=[control], preexec_fn=process_kill.die_with_parent,
            )  # fmt: skip
            process_kill.register_child(client._process.pid)
        except OSError as error:
            client._shut_down(f"{command[0]} can't be started: {error.strerror}")
        client._server_socket.close()
        return client

    @property
    def pid(self) -> int | None:
        """The fork server's process, which has a session of its own; None if there is none."""
        return self._process.pid if self._process else None

    @property
    def is_ready(self) -> bool:
        """Whether the fork server can fork now. This does not wait."""
        if not self._ready and not self.reason:
            kind, text = self._read_answer(0.0)
            if kind == "ready":
                self._ready, self.note = True, text
        if self._ready and self._process is not None and processes.process_state(self._process.pid) in ("", "Z"):
            self._shut_down(self._end_reason())
        return self._ready and not self.reason

    def fork(self, environ: Mapping[str, str], log: Path) -> ForkedRank | None:
        """Fork a rank that runs the command with this environment; None: start it cold.

        Its output is appended to the log. The rank is a child of this process in a session of its own, and ends when this
        process ends. Raises OSError if the log can't be written, or if this process has too many open files.
        """
        if not self.is_ready:
            return None
        before, now = self._environ, _shared_environ(environ)
        if changed := sorted(name for name in before | now if before.get(name) != now.get(name)):
            self._shut_down(f"the environment has changed: {', '.join(changed)}")
            return None
        body = json.dumps({"environ": dict(environ), "parent": os.getpid()}).encode()
        go_read, go_write = os.pipe()
        try:
            try:
                with log.open("ab") as out:
                    self._send_request(struct.pack("I", len(body)), [out.fileno(), go_read], body)
            finally:
                os.close(go_read)
            kind, text = self._read_answer(_FORK_SECONDS)
            if kind != "pid":
                return None
            rank = ForkedRank(int(text))
            with contextlib.suppress(BrokenPipeError):  # the rank was killed in between; its exit status shows that
                os.write(go_write, fork_server.GO_BYTE)
            return rank
        finally:
            os.close(go_write)

    def close(self) -> None:
        """End the fork server. Its ranks continue."""
        self._shut_down("it was closed")

    def _send_request(self, head: bytes, descriptors: Sequence[int], body: bytes) -> None:
        try:
            self._control.settimeout(_FORK_SECONDS)
            socket.send_fds(self._control, [head], descriptors)
            self._control.sendall(body)
        except OSError:
            self._shut_down(self._end_reason())

    def _read_answer(self, seconds: float) -> tuple[str, str]:
        """Return the next answer as ("ready" or "pid", text); ("", "") if none arrives in time or there is no warm start."""
        until = time.monotonic() + seconds
        while not self.reason and b"\n" not in self._received:
            try:
                self._control.settimeout(max(0.0, until - time.monotonic()))
                data = self._control.recv(65536)
            except (BlockingIOError, TimeoutError):
                if seconds > 0:
                    self._shut_down(f"it has not answered for {seconds:g} s")
                return "", ""
            except OSError:
                data = b""
            if not data:
                self._shut_down(self._end_reason())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        kind, _, text = line.decode("utf-8", "replace").partition(" ")
        if kind == "cold":
            self._shut_down(text)
            return "", ""
        return kind, text

    def _end_reason(self) -> str:
        if self.reason:
            return self.reason
        output = os.pread(self._output.fileno(), 1 << 20, 0).decode("utf-8", "replace").strip()
        return f"the process has ended ({output.splitlines()[-1][:200] if output else 'without output'})"

    def _shut_down(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        self._control.close()
        self._server_socket.close()
        self._output.close()
        if self._process is not None:
            process_kill.kill_sessions([self._process.pid])
            process_kill.wait_for_killed(self._process)


class ForkServers:
    """The fork servers of one command during a run: the current one, and its replacement when a rank has imported more."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._current: ForkServerClient | None = None
        self._next: ForkServerClient | None = None
        self._seen_imports: tuple[Path, int] | None = None
        self._imported: set[str] = set()

    def update(self, environ: Mapping[str, str], imports: Path) -> None:
        """Read a new import report of rank 0, if there is one, and start or replace the fork server.

        The agent calls this several times a second. It never waits.

        environ, imports: the environment and the import report of that rank, as for `ForkServerClient.start`.
        """
        try:
            version = imports, imports.stat().st_mtime_ns
            if version != self._seen_imports and self._next is None:
                self._seen_imports = version
                modules = import_report.read_modules(imports)
                if self._current is None or not self._current.is_ready or not modules <= self._imported:
                    self._imported = set(modules)
                    self._next = ForkServerClient.start(self._command, environ, imports)
        except OSError:
            pass  # there is no report yet, or a client can't be created now
        except ValueError:  # e.g. two processes with the page of one rank have written it at once
            log.warning("%s is not a list of imports, and is ignored; start one process with CKPT_PULSE on each rank", imports)
        if self._next is None or not (self._next.is_ready or self._next.reason):
            return
        retired = self._next
        if self._next.is_ready or self._current is None or not self._current.is_ready:
            retired, self._current = self._current or self._next, self._next
        if retired is not self._current:
            retired.close()
        self._next = None

    def fork(self, environ: Mapping[str, str], log: Path) -> ForkedRank | None:
        """Fork a rank as `ForkServerClient.fork` does; None: start it cold."""
        return None if self._current is None else self._current.fork(environ, log)

    @property
    def sessions(self) -> list[int]:
        """The sessions of the processes of all fork servers."""
        return [client.pid for client in (self._current, self._next) if client is not None and client.pid is not None]

    @property
    def status_text(self) -> str:
        """Text: whether the next start is a warm start, or why not."""
        if self._current is None:
            if self._next is None:  # the report is read a moment after that step
                return "no warm start yet: the first rank of this host reports its imports at its first step"
            return "no warm start yet: what it needs is being imported"
        if not self._current.is_ready:
            return f"no warm start: {self._current.reason}"
        return "the next start is warm" + (f", {self._current.note}" if self._current.note else "")

    def close(self) -> None:
        """End the fork servers. Their ranks continue."""
        for client in (self._current, self._next):
            if client is not None:
                client.close()


def _shared_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are the same for all ranks of all attempts."""
    return {name: value for name, value in environ.items() if name not in fork_server.PER_RANK_VARIABLES}
