"""Errors of checkpoints and of groups of ranks; and those of stores, so that all errors can be imported from here."""

from __future__ import annotations

from ckpt.storage.base.errors import AlreadyExists as AlreadyExists
from ckpt.storage.base.errors import Changed as Changed
from ckpt.storage.base.errors import CkptError as CkptError
from ckpt.storage.base.errors import IntegrityError as IntegrityError
from ckpt.storage.base.errors import InvalidArgument as InvalidArgument
from ckpt.storage.base.errors import InvalidName as InvalidName
from ckpt.storage.base.errors import NoSpace as NoSpace
from ckpt.storage.base.errors import NotFound as NotFound
from ckpt.storage.base.errors import Outdated as Outdated
from ckpt.storage.base.errors import Refused as Refused
from ckpt.storage.base.errors import StoreError as StoreError
from ckpt.storage.base.errors import Unavailable as Unavailable
from ckpt.storage.base.errors import UnknownScheme as UnknownScheme


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
