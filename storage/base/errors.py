"""The error tree. One base class, so that `except ckpt.CkptError` catches all of ours and nothing else."""

from __future__ import annotations

import errno
import re


def first_line(error: BaseException) -> str:
    """What an error of a library says, short enough for a message of ours.

    Some bring a stack of C++ frames; gloo begins with the place in its source. Ours goes on after it: no full stop.
    """
    line = str(error).strip().partition("\n")[0].removesuffix(".")
    return re.sub(r"^\[/\S+:\d+\] ", "", line)[:400] or type(error).__name__


class CkptError(Exception):
    """Base of every error this package raises on purpose. The message says what, where and what to do next."""


# --- storage -------------------------------------------------------------------------------------------------


class StoreError(CkptError):
    """A store could not do what was asked: disk full, no permission, network, a failed fsync."""


class NotFound(StoreError):
    """No object of this name is in the store."""


class AlreadyExists(StoreError):
    """A put-if-absent found an object of this name."""


class NoSpace(StoreError):
    """The disk, the quota or the node is full."""


class Changed(StoreError):
    """What was read before is not there any more."""


class Outdated(StoreError):
    """The members that keep the records of a namespace are others than the caller believes, or records and objects were
    collected meanwhile; it must ask for the members anew."""

    unsettled = False
    """Whether a member may have taken a part of the change that was refused."""


class Unavailable(StoreError):
    """A node or a service does not answer in time, or takes nothing at the moment. Others may."""


class Refused(StoreError):
    """A wrong or missing token, certificate, key or permission, or a place that takes nothing: waiting does not help."""


class InvalidName(StoreError, ValueError):
    """A name that could leave the root of the store, or that not every store can hold."""


class UnknownScheme(StoreError, ValueError):
    """No store serves URLs of this scheme, or the package that does is not installed."""


class InvalidArgument(CkptError, ValueError):
    """An option that makes no sense, such as keeping no step at all."""


# --- checkpoints ---------------------------------------------------------------------------------------------


class IntegrityError(CkptError):
    """Stored bytes are not those that were written: flipped, cut or missing."""


# --- as errno values -----------------------------------------------------------------------------------------

_ERRNO_BY_ERROR = (
    (NotFound, errno.ENOENT), (AlreadyExists, errno.EEXIST), (InvalidName, errno.EINVAL), (NoSpace, errno.ENOSPC),
    (Refused, errno.EACCES), (Unavailable, errno.EHOSTDOWN), (Changed, errno.ESTALE),
)  # fmt: skip


def error_number(error: CkptError) -> int:
    """The errno of an error, for programs that know only those."""
    return next((number for kind, number in _ERRNO_BY_ERROR if isinstance(error, kind)), errno.EIO)
