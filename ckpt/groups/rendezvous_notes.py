"""Notes of a rank that cannot reach the rendezvous store, so that other ranks fail before their timeout."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import dataclass

from ckpt import errors
from ckpt.errors import GroupError
from ckpt.groups import host_notes
from ckpt.groups.base import Group
from ckpt.groups.process_identity import process_start_ticks
from ckpt.storage.base.checked_decode import read_json
from ckpt.storage.base.errors import StoreError

_raised_tokens: set[str] = set()
"""Tokens of the notes that this process has raised. Each is raised once, since the ranks may try another rendezvous later.
Used without a lock, as each call of a set is atomic."""


class OtherRankFailed(GroupError):
    """Another rank has left a note that it cannot reach the rendezvous store. This rank leaves no note of its own."""


@dataclass(frozen=True, slots=True)
class _FailureNote:
    """The note of a rank that cannot reach the store."""

    rank: int
    cause: StoreError
    """The error of that rank, built from its class name, message and errno."""
    at: float
    """When the note was left, in seconds since the boot of this host."""
    token: str
    """Distinguishes the note from every other one."""


class RendezvousNotes:
    """The note of a job's ranks about one rendezvous store. There is one note for all ranks; a later one replaces it."""

    def __init__(self, group: Group, job: str, url: str) -> None:
        self._group = group
        self._key = f"meeting/{job}/{group.size}/{url}"
        self._url = url

    def leave(self, error: StoreError) -> None:
        """Publish why this rank cannot reach the store."""
        note = {"rank": self._group.rank, "reason": str(error), "at": _boot_clock_seconds(), "token": secrets.token_hex(8)}
        note |= {"kind": errors.shared_class_name(error), "errno": getattr(error.__cause__, "errno", None)}
        self._group.leave_note(self._key, json.dumps(note).encode())

    def withdraw(self) -> None:
        """Remove the note of this rank, which tries again."""
        note = self._read()
        if note is not None and note.rank == self._group.rank:
            with contextlib.suppress(OSError):
                host_notes.remove(self._key)

    def raise_failure(self) -> None:
        """Raise OtherRankFailed if another rank has left a note since this process started; an older note is of an earlier job.

        The cause has the class of the other rank's error, by which ckpt-run decides whether a restart can help.
        """
        note = self._read()
        if note is None:
            return
        began = _process_started_at()
        if note.rank == self._group.rank or note.token in _raised_tokens or began is None or note.at < began:
            return
        _raised_tokens.add(note.token)
        where = "" if self._url in str(note.cause) else f" at {self._url}"
        raise OtherRankFailed(
            f"{self._group!r}: rank {note.rank} cannot join the other ranks{where}: {note.cause}"
        ) from note.cause

    def _read(self) -> _FailureNote | None:
        """Return the note of the ranks; None if there is none, or if it is malformed."""
        data = self._group.note(self._key)
        try:
            note = read_json(data or b"null")
            if note is None:
                return None
            kind = getattr(errors, str(note.get("kind")), StoreError)
            cause = kind(str(note["reason"])) if issubclass(kind, StoreError) else StoreError(str(note["reason"]))
            if isinstance(note.get("errno"), int):
                cause.__cause__ = OSError(note["errno"], os.strerror(note["errno"]))
            return _FailureNote(int(note["rank"]), cause, float(note["at"]), str(note["token"]))
        except (ValueError, KeyError, TypeError):
            return None


def _boot_clock_seconds() -> float:
    """Return the seconds since this host was booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0


def _process_started_at() -> float | None:
    """Return when this process started, in seconds since boot; None if the system does not provide it."""
    ticks = process_start_ticks(os.getpid())
    return int(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
