"""The class Options, the checked options of a save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ckpt.format import codec
from ckpt.format.digest import require_algorithm
from ckpt.repository.retention import Keep
from ckpt.saving import commit_wait
from ckpt.saving.nan_check import NanOption
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.storage.base.errors import InvalidArgument
from ckpt.support.validation import check_choice, check_switch, checked_bytes, checked_positive, checked_seconds

DifferenceOption: TypeAlias = int | Literal["auto"] | None
"""Values of the argument full_every=."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to save. `ckpt.save` documents the options that users give.

    Raises InvalidArgument for a value that no save can use, before anything is written.
    """

    codec: codec.CodecOption = "auto"
    digest: str = "auto"
    memory: int | None = None
    keep: Keep | None = None
    overwrite: bool = False
    in_flight: int = 1
    deferrable: Callable[[ArrayLeaf], bool] | None = None
    """Returns whether a leaf stays unchanged until `SaveHandle.staged` is set."""
    timeout: float = commit_wait.COMMIT_TIMEOUT_SECONDS
    """How many seconds to wait for the other ranks of a group."""
    verify_replicas: bool | None = None
    """Whether each rank digests the replicas that it has, so that the committer can compare them; None for a sample of them."""
    nan: NanOption = "warn"
    """What to do about a NaN in a leaf."""
    full_every: DifferenceOption = "auto"
    """How many step numbers share one full save, to which the other saves store differences; None for full blocks only. "auto"
    stores differences where they make saves with `codec="auto"` much faster."""
    propose_next_step: Callable[[], int] | None = None
    """Returns the step to save next. Rank 0 calls it at the commit."""

    @property
    def copies(self) -> int:
        """The number of copies of blocks that do not change; see `Keep`."""
        return 1 if self.keep is None else self.keep.copies

    def __post_init__(self) -> None:
        codec.parse_option(self.codec)
        if self.digest != "auto":
            require_algorithm(self.digest)
        checked_bytes("memory", self.memory)
        checked_seconds("timeout", self.timeout)
        check_switch("overwrite", self.overwrite)
        if self.verify_replicas is not None:
            check_switch("verify_replicas", self.verify_replicas)
        check_choice("nan", self.nan, *get_args(NanOption))
        if self.full_every not in (None, "auto"):
            checked_positive("full_every", self.full_every, "a positive number of steps, 'auto', or None for no differences")
            if self.copies > 1:
                raise InvalidArgument("full_every: differences of many steps share one base, so use Keep with copies=1")
        checked_positive("in_flight", self.in_flight, "a positive number of saves")
