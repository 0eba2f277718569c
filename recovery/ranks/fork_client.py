"""Warm starts: ranks that are forked from a process that has imported already what they import
(`ckpt.recovery.ranks.fork_server`).

A new interpreter needs seconds to import torch; a fork of one that has done so needs milliseconds. Whatever can't be started so
is started cold, as without this file: nothing here raises but where a log can't be written, and `reason` says why not. All is
to be called from the main thread: what is started here ends with the thread that starts it.
"""

from __future__ import annotations

import contextlib
import json
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

from ckpt.recovery.ranks import fork_server as other_side
from ckpt.recovery.ranks import processes

_PYTHON_NAME = re.compile(r"python(\d+(\.\d+)*)?[dt]?")
_PYTHON_FLAGS = frozenset("bBdEIOPqRsSuv")
_FORK_SECONDS = 5.0
"""A busy host may take its time; longer, and a cold start is sooner there."""


class NotForkable(Exception):
    """A command that can't be started warm, and why."""


class ScriptNotFound(NotForkable):
    """Nor can it be started cold: Python will not find its script."""


def split_python_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """`python -u train.py --lr 1` as (python -u) and (train.py --lr 1); a module as (-m, module, …). Raises Cold."""
    if not _PYTHON_NAME.fullmatch(os.path.basename(command[0])):
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
        raise NotForkable(f"{script} is no file of Python source")
    return flags, [*command[at:]]


class ForkedRank:
    """A rank that was forked: what the rest of this part needs of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        processes.register_child(pid)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._wait_status(os.WNOHANG)

    def wait(self) -> int:
        """The exit status, once it has ended."""
        status = self._wait_status(0)
        assert status is not None
        return status

    def _wait_status(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # somebody else has heard how it ended: not well, for all we know
                pid, status = self.pid, 255 << 8
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServerClient:
    """The process that forks the ranks of one command, as often as it is asked to, until `close`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.reason = ""
        """Why there is no warm start; empty as long as there may be one."""
        self.note = ""
        """What is not imported ahead, and why."""
        self._environ = _shared_environ(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()
        self._control, self._server_socket = socket.socketpair()
        self._received = b""
        self._ready = False

    @classmethod
    def start(cls, command: Sequence[str], environ: Mapping[str, str], imports: Path) -> Self:
        """Start it, at low priority. environ: of a rank. imports: what a rank told (`ckpt.training.import_report`), which it
        reads now.

        This process becomes the one that adopts orphans: so the ranks become its children.
        """
        client = cls(environ)
        try:
            flags, script = split_python_command(command)
        except NotForkable as why:
            client._shut_down(str(why))
            return client
        processes.adopt_orphans()
        control = client._server_socket.fileno()
        arguments = [other_side.BOOTSTRAP, other_side.__file__, str(control), str(imports), "{}"]
        try:
            client._process = subprocess.Popen(
                [*flags, "-c", *arguments, *script], stdin=subprocess.DEVNULL, stdout=client._output, stderr=client._output,
                env=client._environ, start_new_session=True, pass_fds=[control], preexec_fn=processes.die_with_parent,
            )  # fmt: skip
            processes.register_child(client._process.pid)
        except OSError as error:
            client._shut_down(f"{command[0]} can't be started: {error.strerror}")
        client._server_socket.close()
        return client

    @property
    def pid(self) -> int | None:
        """Its process, which is a session of its own; None where there is none."""
        return self._process.pid if self._process else None

    @property
    def is_ready(self) -> bool:
        """Whether it can fork now. Does not wait."""
        if not self._ready and not self.reason:
            kind, text = self._read_answer(0.0)
            if kind == "ready":
                self._ready, self.note = True, text
        if self._ready and self._process is not None and processes.process_state(self._process.pid) in ("", "Z"):
            self._shut_down(self._end_reason())
        return self._ready and not self.reason

    def fork(self, environ: Mapping[str, str], log: Path) -> ForkedRank | None:
        """A rank that runs the command with this environment, its output appended to the log; None: start it cold.

        It is a child of this process in a session of its own, and ends when this process does. Raises OSError where the
        log can't be written.
        """
        if not self.is_ready:
            return None
        ours, theirs = self._environ, _shared_environ(environ)
        if differs := sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name)):
            self._shut_down(f"the environment has changed: {', '.join(differs)}")
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
            with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile: it says so itself
                os.write(go_write, other_side.GO_BYTE)
            return rank
        finally:
            os.close(go_write)

    def close(self) -> None:
        """End it. The ranks go on."""
        self._shut_down("it was closed")

    def _send_request(self, head: bytes, descriptors: Sequence[int], body: bytes) -> None:
        try:
            self._control.settimeout(_FORK_SECONDS)
            socket.send_fds(self._control, [head], descriptors)
            self._control.sendall(body)
        except OSError:
            self._shut_down(self._end_reason())

    def _read_answer(self, seconds: float) -> tuple[str, str]:
        """What it says next, as ("ready" or "pid", text); ("", "") where it says nothing in time, or says why not."""
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
        said = os.pread(self._output.fileno(), 1 << 20, 0).decode("utf-8", "replace").strip()
        return f"the process has ended ({said.splitlines()[-1][:200] if said else 'it has said nothing'})"

    def _shut_down(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        self._control.close()
        self._server_socket.close()
        self._output.close()
        if self._process is not None:
            processes.kill_sessions([self._process.pid])
            self._process.wait()


class ForkServers:
    """The warm starts of one command, for the life of a run: a forge, and where a rank has imported more, a better one."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._current: ForkServerClient | None = None
        self._next: ForkServerClient | None = None
        self._seen_imports: tuple[Path, int] | None = None
        self._imported: set[str] = set()

    def update(self, environ: Mapping[str, str], imports: Path) -> None:
        """See whether rank 0 has told what it has imported, and prepare for the next start. To be called often; never waits.

        environ, imports: of that rank, as for `Forge.begin`.
        """
        try:
            seen = imports, imports.stat().st_mtime_ns
            if seen != self._seen_imports and self._next is None:
                self._seen_imports = seen
                modules = json.loads(imports.read_text())["modules"].keys()
                if self._current is None or not self._current.is_ready or not modules <= self._imported:
                    self._imported = set(modules)
                    self._next = ForkServerClient.start(self._command, environ, imports)
        except OSError:
            pass  # not yet
        if self._next is None or not (self._next.is_ready or self._next.reason):
            return
        retired = self._next
        if self._next.is_ready or self._current is None or not self._current.is_ready:
            retired, self._current = self._current or self._next, self._next
        if retired is not self._current:
            retired.close()
        self._next = None

    def fork(self, environ: Mapping[str, str], log: Path) -> ForkedRank | None:
        """As `Forge.fork`."""
        return None if self._current is None else self._current.fork(environ, log)

    @property
    def status_text(self) -> str:
        """In words: whether the next start is a warm one, or why not."""
        if self._current is None:
            return "no warm start yet: " + ("what it needs is being imported" if self._next else "no rank has done a step")
        if not self._current.is_ready:
            return f"no warm start: {self._current.reason}"
        return "the next start is warm" + (f", {self._current.note}" if self._current.note else "")

    def close(self) -> None:
        """End what was begun. The ranks go on."""
        for client in (self._current, self._next):
            if client is not None:
                client.close()


def _shared_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What all ranks of all attempts are told."""
    return {name: value for name, value in environ.items() if name not in other_side.PER_RANK_VARIABLES}
