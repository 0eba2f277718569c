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


class SignatureError(IntegrityError):
    """A key was given, and a step is not signed with it: saved without a key, or changed by somebody else."""


class FormatError(CkptError):
    """Not a repository, or one that a newer version wrote."""


class StepNotFound(CkptError, LookupError):
    """The repository holds no such committed step."""


class LeafNotFound(CkptError, LookupError):
    """The checkpoint holds no such leaf, or no leaf matches a pattern."""


class LeafMismatch(CkptError, ValueError):
    """A leaf of `like` differs from the saved one in shape, dtype or kind."""


class UnsupportedLeaf(CkptError, TypeError):
    """A leaf that cannot be stored without pickle."""


class NotFinite(CkptError):
    """A leaf has a NaN, and the save was asked to refuse that."""


class StagingFailed(CkptError):
    """A leaf could not be copied to staging memory: the host has none left, or the framework failed."""


MORE_MEMORY_ADVICE = "give memory= a smaller number of bytes, save with blocking=True, or keep less else in memory"
"""What to do where there is no memory for staging."""


class StateChanged(CkptError):
    """A leaf was modified while an asynchronous save was still reading it; that save was given up."""


class RepositoryBusy(CkptError):
    """Another live process is writing to the repository."""


class Fenced(CkptError):
    """A newer writer has taken the repository over; this one may not commit any more."""


class SaveFailed(CkptError):
    """A save in the background failed; the cause is chained."""


class GroupError(CkptError):
    """The ranks of a group could not meet, or do not agree."""

    noted: bool = False
    """Another rank has left a note with the reason, so that this rank leaves none."""


class StepRefused(CkptError):
    """What the ranks wrote does not make a whole step: a gap, an overlap, or ranks that contradict each other."""


class RanksMissing(StepRefused):
    """Ranks did not bring their part of a step in time."""

    given_up: bool = False
    """Rank 0 has said so: it will not commit this try any more."""


# --- as a file system says it --------------------------------------------------------------------------------

_ERRNO_BY_ERROR = (
    (NotFound, errno.ENOENT), (AlreadyExists, errno.EEXIST), (InvalidName, errno.EINVAL), (NoSpace, errno.ENOSPC),
    (Refused, errno.EACCES), (Unavailable, errno.EHOSTDOWN), (Changed, errno.ESTALE),
)  # fmt: skip


def error_number(error: CkptError) -> int:
    """The errno of an error, for programs that know only those."""
    return next((number for kind, number in _ERRNO_BY_ERROR if isinstance(error, kind)), errno.EIO)
