"""The errors of stores, and CkptError, the base class of all errors of ckpt; ckpt/errors.py has those of checkpoints."""

from __future__ import annotations

import errno
import os
import re


def first_line(error: BaseException) -> str:
    """Return the message of a library's error, shortened so that it can be a part of another message.

    Some messages contain a C++ stack, and those of gloo begin with a file and a line. A final full stop is removed.
    """
    line = str(error).strip().partition("\n")[0].removesuffix(".")
    return re.sub(r"^\[/\S+:\d+\] ", "", line)[:400] or type(error).__name__


_TRANSIENT_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.EIO}
_TRANSIENT_TEXTS = tuple(os.strerror(number) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)) + (
    "can't start new thread", "failed to map segment",
)  # fmt: skip
"""Texts of errors without an errno: those of the loader of shared libraries and of the start of threads."""


def is_transient(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, may be temporary, and so is not a sign of damage.

    The process may lack memory, stack, descriptors or threads, or a file system may not answer.
    """
    return transient_cause(error) is not None


def transient_cause(error: BaseException | None) -> BaseException | None:
    """Return the error or the cause of it that may be temporary, as `is_transient` defines it; None if there is none."""
    while error is not None:
        if isinstance(error, MemoryError | RecursionError) or getattr(error, "errno", None) in _TRANSIENT_ERRNOS:
            return error
        if isinstance(error, ImportError | OSError | RuntimeError) and any(text in str(error) for text in _TRANSIENT_TEXTS):
            return error
        error = error.__cause__ or error.__context__
    return None


class CkptError(Exception):
    """The base class of every error that ckpt raises on purpose. The message says what happened, where, and what to do next."""


# --- storage -------------------------------------------------------------------------------------------------


class StoreError(CkptError):
    """An operation of a store failed: disk full, no permission, network, a failed fsync."""


class NotFound(StoreError):
    """The store has no object of this name."""


class AlreadyExists(StoreError):
    """An object or a step that must be new exists already."""


class NoSpace(StoreError):
    """The disk, the quota or the node is full."""


class Changed(StoreError):
    """An object has changed or was deleted since it was read."""


class Outdated(StoreError):
    """The caller's list of members that keep the records of a namespace is outdated; it must read the list again.

    Either the members have changed, or tombstones and objects were removed meanwhile.
    """


class Unavailable(StoreError):
    """A node or a service does not answer in time, or accepts nothing now. Another node may."""


class Untrusted(Unavailable):
    """The other side has no certificate that this process can verify. Try another node; waiting does not help."""


class Refused(StoreError):
    """A token, certificate, key or permission is wrong or missing, or the store is read-only: waiting does not help."""


class LoginLost(Refused):
    """An earlier login has ended, and there is no new one now, for example while a password is replaced: waiting may help."""


class InvalidName(StoreError, ValueError):
    """A name that could escape the root of the store, or that not every store can represent."""


class UnknownScheme(StoreError, ValueError):
    """No store handles URLs of this scheme, or the package that does is not installed."""


class InvalidArgument(CkptError, ValueError):
    """An option has a value that makes no sense, such as keeping no step at all."""


# --- damage ---------------------------------------------------------------------------------------------------


class IntegrityError(CkptError):
    """Stored bytes differ from those that were written: changed, truncated or missing."""


_BAD_SECTOR_ERRNOS = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.ENODATA}
"""EIO; a checksum of the file system that does not match (XFS, ext4: EUCLEAN, EBADMSG); past the page cache, the errors of the
block layer for a checksum of the device (EILSEQ) and for a bad medium (ENODATA)."""


def is_bad_sector(error: StoreError) -> bool:
    """Return whether the device could not read the bytes. That is damage, unlike a store that cannot be reached."""
    return not isinstance(error, Unavailable) and getattr(error.__cause__, "errno", None) in _BAD_SECTOR_ERRNOS


def is_damage(error: CkptError) -> bool:
    """Return whether an error of a read means that the stored bytes are damaged.

    Otherwise nothing is known about them: the store can't be reached, refuses the read, or has data of a newer version.
    """
    return isinstance(error, IntegrityError) or (isinstance(error, StoreError) and is_bad_sector(error))


# --- as errno values -----------------------------------------------------------------------------------------

_ERRNO_BY_ERROR = (
    (NotFound, errno.ENOENT), (AlreadyExists, errno.EEXIST), (InvalidName, errno.EINVAL), (NoSpace, errno.ENOSPC),
    (Refused, errno.EACCES), (Unavailable, errno.EHOSTDOWN), (Changed, errno.ESTALE),
)  # fmt: skip


def error_number(error: CkptError) -> int:
    """Return the errno of an error, for interfaces of file systems."""
    return next((number for kind, number in _ERRNO_BY_ERROR if isinstance(error, kind)), errno.EIO)
