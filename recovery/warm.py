"""Warm starts: ranks that are forked from a process that has imported already what they import (`ckpt.recovery.forge`).

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

from ckpt.recovery import forge as other_side
from ckpt.recovery import host

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?[dt]?")
_FLAGS = frozenset("bBdEIOPqRsSuv")
_FORK_SECONDS = 5.0
"""A busy host may take its time; longer, and a cold start is sooner there."""


class Cold(Exception):
    """A command that can't be started warm, and why."""


class NoScript(Cold):
    """Nor can it be started cold: Python will not find its script."""


def split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """`python -u train.py --lr 1` as (python -u) and (train.py --lr 1); a module as (-m, module, …). Raises Cold."""
    if not _PYTHON.fullmatch(os.path.basename(command[0])):
        raise Cold(f"{command[0]} is not python")
    at, flags = 1, [command[0]]
    while at < len(command) and command[at].startswith("-"):
        word = command[at]
        for place, letter in enumerate(word[1:], 1):
            rest = word[place + 1 :]
            if letter == "m" and (rest or at + 1 < len(command)):
                before = [word[:place]] if place > 1 else []
                return [*flags, *before], ["-m", *([rest] if rest else []), *command[at + 1 :]]
            if letter in "WX":
                if not rest:
                    flags.append(word)
                    at, word = at + 1, "".join(command[at + 1 : at + 2])
                break
            if letter not in _FLAGS:
                raise Cold(f"python {word} runs no script")
        else:
            if len(word) == 1:
                raise Cold("the script is read from the standard input")
        flags.append(word)
        at += 1
    if at >= len(command):
        raise Cold("python is given no script")
    script = command[at]
    if not os.path.exists(script):
        raise NoScript(f"there is no {script} here")
    if not os.path.isfile(script) or script.endswith(".pyc") or zipfile.is_zipfile(script):
        raise Cold(f"{script} is no file of Python source")
    return flags, [*command[at:]]


class Forged:
    """A rank that was forked: what the rest of this part needs of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        host.own(pid)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._ask(os.WNOHANG)

    def wait(self) -> int:
        """The exit status, once it has ended."""
        status = self._ask(0)
        assert status is not None
        return status

    def _ask(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # somebody else has heard how it ended: not well, for all we know
                pid, status = self.pid, 255 << 8
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Forge:
    """The process that forks the ranks of one command, as often as it is asked to, until `close`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.reason = ""
        """Why there is no warm start; empty as long as there may be one."""
        self.note = ""
        """What is not imported ahead, and why."""
        self._environ = _common(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()
        self._control, self._theirs = socket.socketpair()
        self._heard = b""
        self._ready = False

    @classmethod
    def begin(cls, command: Sequence[str], environ: Mapping[str, str], imports: Path) -> Self:
        """Start it, at low priority. environ: of a rank. imports: what a rank told (`ckpt.imports`), which it reads now.

        This process becomes the one that adopts orphans: so the ranks become its children.
        """
        forge = cls(environ)
        try:
            flags, script = split(command)
        except Cold as why:
            forge._give_up(str(why))
            return forge
        host.adopt_orphans()
        control = forge._theirs.fileno()
        arguments = [other_side.START, other_side.__file__, str(control), str(imports), "{}"]
        try:
            forge._process = subprocess.Popen(
                [*flags, "-c", *arguments, *script], stdin=subprocess.DEVNULL, stdout=forge._said, stderr=forge._said,
                env=forge._environ, start_new_session=True, pass_fds=[control], preexec_fn=host.die_with_parent,
            )  # fmt: skip
            host.own(forge._process.pid)
        except OSError as error:
            forge._give_up(f"{command[0]} can't be started: {error.strerror}")
        forge._theirs.close()
        return forge

    @property
    def pid(self) -> int | None:
        """Its process, which is a session of its own; None where there is none."""
        return self._process.pid if self._process else None

    @property
    def ready(self) -> bool:
        """Whether it can fork now. Does not wait."""
        if not self._ready and not self.reason:
            kind, text = self._answer(0.0)
            if kind == "ready":
                self._ready, self.note = True, text
        if self._ready and self._process is not None and host.state(self._process.pid) in ("", "Z"):
            self._give_up(self._last_words())
        return self._ready and not self.reason

    def fork(self, environ: Mapping[str, str], log: Path) -> Forged | None:
        """A rank that runs the command with this environment, its output appended to the log; None: start it cold.

        It is a child of this process in a session of its own, and ends when this process does. Raises OSError where the
        log can't be written.
        """
        if not self.ready:
            return None
        ours, theirs = self._environ, _common(environ)
        if differs := sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name)):
            self._give_up(f"the environment has changed: {', '.join(differs)}")
            return None
        body = json.dumps({"environ": dict(environ), "parent": os.getpid()}).encode()
        go, begin = os.pipe()
        try:
            try:
                with log.open("ab") as out:
                    self._send(struct.pack("I", len(body)), [out.fileno(), go], body)
            finally:
                os.close(go)
            kind, text = self._answer(_FORK_SECONDS)
            if kind != "pid":
                return None
            rank = Forged(int(text))
            with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile: it says so itself
                os.write(begin, other_side.GO)
            return rank
        finally:
            os.close(begin)

    def close(self) -> None:
        """End it. The ranks go on."""
        self._give_up("it was closed")

    def _send(self, head: bytes, descriptors: Sequence[int], body: bytes) -> None:
        try:
            self._control.settimeout(_FORK_SECONDS)
            socket.send_fds(self._control, [head], descriptors)
            self._control.sendall(body)
        except OSError:
            self._give_up(self._last_words())

    def _answer(self, seconds: float) -> tuple[str, str]:
        """What it says next, as ("ready" or "pid", text); ("", "") where it says nothing in time, or says why not."""
        until = time.monotonic() + seconds
        while not self.reason and b"\n" not in self._heard:
            try:
                self._control.settimeout(max(0.0, until - time.monotonic()))
                data = self._control.recv(65536)
            except (BlockingIOError, TimeoutError):
                if seconds > 0:
                    self._give_up(f"it has not answered for {seconds:g} s")
                return "", ""
            except OSError:
                data = b""
            if not data:
                self._give_up(self._last_words())
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        kind, _, text = line.decode("utf-8", "replace").partition(" ")
        if kind == "cold":
            self._give_up(text)
            return "", ""
        return kind, text

    def _last_words(self) -> str:
        if self.reason:
            return self.reason
        said = os.pread(self._said.fileno(), 1 << 20, 0).decode("utf-8", "replace").strip()
        return f"the process has ended ({said.splitlines()[-1][:200] if said else 'it has said nothing'})"

    def _give_up(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        self._control.close()
        self._theirs.close()
        self._said.close()
        if self._process is not None:
            host.end([self._process.pid])
            self._process.wait()


class WarmStarts:
    """The warm starts of one command, for the life of a run: a forge, and where a rank has imported more, a better one."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._forge: Forge | None = None
        self._next: Forge | None = None
        self._told: tuple[Path, int] | None = None
        self._known: set[str] = set()

    def look(self, environ: Mapping[str, str], imports: Path) -> None:
        """See whether rank 0 has told what it has imported, and prepare for the next start. To be called often; never waits.

        environ, imports: of that rank, as for `Forge.begin`.
        """
        try:
            told = imports, imports.stat().st_mtime_ns
            if told != self._told and self._next is None:
                self._told = told
                modules = json.loads(imports.read_text())["modules"].keys()
                if self._forge is None or not self._forge.ready or not modules <= self._known:
                    self._known = set(modules)
                    self._next = Forge.begin(self._command, environ, imports)
        except OSError:
            pass  # not yet
        if self._next is None or not (self._next.ready or self._next.reason):
            return
        worse = self._next
        if self._next.ready or self._forge is None or not self._forge.ready:
            worse, self._forge = self._forge or self._next, self._next
        if worse is not self._forge:
            worse.close()
        self._next = None

    def fork(self, environ: Mapping[str, str], log: Path) -> Forged | None:
        """As `Forge.fork`."""
        return None if self._forge is None else self._forge.fork(environ, log)

    @property
    def said(self) -> str:
        """In words: whether the next start is a warm one, or why not."""
        if self._forge is None:
            return "no warm start yet: " + ("what it needs is being imported" if self._next else "no rank has done a step")
        if not self._forge.ready:
            return f"no warm start: {self._forge.reason}"
        return "the next start is warm" + (f", {self._forge.note}" if self._forge.note else "")

    def close(self) -> None:
        """End what was begun. The ranks go on."""
        for forge in (self._forge, self._next):
            if forge is not None:
                forge.close()


def _common(environ: Mapping[str, str]) -> dict[str, str]:
    """What all ranks of all attempts are told."""
    return {name: value for name, value in environ.items() if name not in other_side.PER_RANK}
