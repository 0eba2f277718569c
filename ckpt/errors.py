"""Errors of checkpoints and of groups of ranks; the errors of stores that users catch can be imported from here too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
from ckpt.storage.base.errors import Untrusted as Untrusted
from ckpt.storage.base.errors import is_bad_sector


class SignatureError(IntegrityError):
    """A key was given, and the step is not signed with it: it was saved without a key, or somebody has changed it."""


class FormatError(CkptError):
    """The data are not in the format of ckpt, or a newer version wrote them."""


class StepNotFound(CkptError, LookupError):
    """The repository has no such committed step."""


class LeafNotFound(CkptError, LookupError):
    """The step has no such leaf, or no leaf matches a pattern."""


class LeafMismatch(CkptError, ValueError):
    """A leaf of `like` differs from the saved one in shape, dtype or kind."""


class UnsupportedLeaf(CkptError, TypeError):
    """A leaf cannot be stored without pickle, or a load could not restore it."""


class NotFinite(CkptError):
    """A leaf has a NaN, and the save was called with nan="refuse"."""


class StagingFailed(CkptError):
    """A leaf could not be copied to staging memory: the host has no memory left, or the framework failed."""


MORE_MEMORY_ADVICE = "give memory= a smaller number of bytes, save with blocking=True, or free memory of the host"
"""The advice in messages about missing memory for staging."""


MAX_NAMED_LEAVES = 3
"""The most leaves that one message names."""


DAMAGE_ADVICE = "restore the file from a copy, or load another step"
"""The advice in messages about a damaged file of a step."""


def damage_text(where: str, what: str) -> str:
    """Return the message about a damaged file of a step. where: the file. what: how the damage shows."""
    return f"{where} is damaged: {what}; {DAMAGE_ADVICE}"


@contextmanager
def bad_sectors_as_damage(where: str) -> Iterator[None]:
    """Raise IntegrityError instead of the StoreError of a read that the device can't do; other errors pass unchanged.

    where: what is read, as the message names it.
    """
    try:
        yield
    except StoreError as error:
        if not is_bad_sector(error):
            raise
        raise IntegrityError(f"{where} cannot be read ({error}); {DAMAGE_ADVICE}") from error


class StateChanged(CkptError):
    """A leaf was modified while an asynchronous save was still reading it; that save failed."""


class RepositoryBusy(CkptError):
    """Another live process is writing to the repository."""


class Fenced(CkptError):
    """A newer writer has taken over the repository; this one may not commit any more."""


class SaveFailed(CkptError):
    """A background save failed; the error is chained as the cause."""


class GroupError(CkptError):
    """The ranks of a group could not communicate, or do not agree."""


class StepRefused(CkptError):
    """The parts of the ranks do not form a complete step: a gap, an overlap, or a contradiction between ranks."""

    may_be_committed: bool = False
    """Whether rank 0 could not find out if the step is committed. Then the files of no rank are deleted."""
    is_store_full: bool = False
    """Whether a rank has failed because its store is full."""

    @property
    def is_certain(self) -> bool:
        """Whether no rank commits this save attempt any more, now or later."""
        return not self.may_be_committed


class StepSkipped(StepRefused):
    """A rank has left the step out, for example because its loss is not finite, so no rank saves it. Nothing has failed."""


class RanksMissing(StepRefused):
    """Some ranks did not publish their part of a step in time."""

    given_up: bool = False
    """Whether rank 0 has announced that it will not commit this save attempt any more. If not, this rank alone has stopped
    waiting, and rank 0 may still commit."""

    @property
    def is_certain(self) -> bool:
        return self.given_up and not self.may_be_committed


def shared_class_name(error: BaseException) -> str:
    """Return the name of the error's class, for a rank that may not have the class.

    For an error of a store with classes of its own, this is the nearest base class in this module.
    """
    return next((c.__name__ for c in type(error).__mro__ if globals().get(c.__name__) is c), type(error).__name__)
