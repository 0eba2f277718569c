"""Notes of ranks that meet at a store and can't reach it: the other ranks of the host must not wait until the timeout."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time

from ckpt import errors
from ckpt.errors import GroupError
from ckpt.groups import host_notes
from ckpt.groups.base import Group
from ckpt.groups.process_identity import process_start_ticks
from ckpt.storage.base.errors import StoreError

_raised_tokens: set[str] = set()
"""Tokens of the notes that this process has raised. Each counts once, for the ranks may meet again after that."""


class RendezvousNotes:
    """The note of a job's ranks about one meeting place. One rank that fails is enough: a later note replaces it."""

    def __init__(self, group: Group, job: str, url: str) -> None:
        self._group = group
        self._key = f"meeting/{job}/{group.size}/{url}"
        self._url = url

    def leave(self, error: StoreError) -> None:
        """Note why this rank can't take part."""
        note = {"rank": self._group.rank, "reason": str(error), "at": _boot_clock_seconds(), "token": secrets.token_hex(8)}
        note |= {"kind": type(error).__name__, "errno": getattr(error.__cause__, "errno", None)}
        self._group.leave_note(self._key, json.dumps(note).encode())

    def withdraw(self) -> None:
        """This rank tries again."""
        said = self._read()
        if said is not None and said[0] == self._group.rank:
            with contextlib.suppress(OSError):
                host_notes.remove(self._key)

    def raise_failure(self) -> None:
        """Raise GroupError where another rank has left a note since this process began: an older one is of an earlier job.

        Its cause is of the kind that the other rank met: by it ckpt-run sees whether another start would help.
        """
        said = self._read()
        if said is None:
            return
        rank, cause, at, token = said
        began = _process_started_at()
        if rank == self._group.rank or token in _raised_tokens or began is None or at < began:
            return
        _raised_tokens.add(token)
        where = "" if self._url in str(cause) else f" at {self._url}"
        error = GroupError(f"{self._group!r}: rank {rank} can't meet the others{where}: {cause}")
        error.noted = True
        raise error from cause

    def _read(self) -> tuple[int, StoreError, float, str] | None:
        data = self._group.note(self._key)
        try:
            note = json.loads(data or b"null")
            if note is None:
                return None
            kind = getattr(errors, str(note.get("kind")), StoreError)
            cause = kind(str(note["reason"])) if issubclass(kind, StoreError) else StoreError(str(note["reason"]))
            if isinstance(note.get("errno"), int):
                cause.__cause__ = OSError(note["errno"], os.strerror(note["errno"]))
            return int(note["rank"]), cause, float(note["at"]), str(note["token"])
        except (ValueError, KeyError, TypeError):
            return None


def _boot_clock_seconds() -> float:
    """Seconds since this host was booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0


def _process_started_at() -> float | None:
    """When this process began, likewise; None where that can't be found out."""
    ticks = process_start_ticks(os.getpid())
    return int(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
