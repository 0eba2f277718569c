"""What a save is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from ckpt.format import codec
from ckpt.format.digest import require_algorithm
from ckpt.repository.retention import Keep
from ckpt.saving import rank_parts
from ckpt.saving.nan_check import NanOption
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.storage.base.errors import InvalidArgument
from ckpt.support.validation import check_switch, checked_bytes, checked_positive, checked_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to save. See `ckpt.save` for what each means to a user."""

    codec: codec.CodecOption = "auto"
    digest: str = "auto"
    memory: int | None = None
    keep: Keep | None = None
    overwrite: bool = False
    in_flight: int = 1
    deferrable: Callable[[ArrayLeaf], bool] | None = None
    """Leaves that nobody changes before `SaveHandle.staged` is set."""
    timeout: float = rank_parts.TIMEOUT_SECONDS
    """Seconds to wait for the other ranks of a group."""
    verify_replicas: bool | None = None
    """Digest the copies of a shard that other ranks hold, so that the committer can compare them; None: a sample of them."""
    nan: NanOption = "warn"
    """What to do about a NaN in a leaf."""
    propose_next_step: Callable[[], int] | None = None
    """The step to save next, asked at the commit by rank 0."""

    @property
    def copies(self) -> int:
        """See `Keep`."""
        return 1 if self.keep is None else self.keep.copies

    def __post_init__(self) -> None:
        codec.parse_option(self.codec)  # a wrong wish is told before anything is written
        if self.digest != "auto":
            require_algorithm(self.digest)
        checked_bytes("memory", self.memory)
        checked_seconds("timeout", self.timeout)
        check_switch("overwrite", self.overwrite)
        if self.verify_replicas is not None:
            check_switch("verify_replicas", self.verify_replicas)
        if self.nan not in get_args(NanOption):
            raise InvalidArgument(f"nan={self.nan!r}: use 'warn', 'refuse' or 'allow'")
        checked_positive("in_flight", self.in_flight, "a positive number of saves")
