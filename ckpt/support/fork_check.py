"""Which process made an object. A child that is forked later has a copy of the object, without the threads that work for it,
and with the rights and the counters of its parent: such a copy must not write."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckpt.storage.base.errors import CkptError


@dataclass(frozen=True, slots=True)
class CreatorProcess:
    """The process that made an object; part of that object."""

    pid: int = field(default_factory=os.getpid)

    @property
    def is_current(self) -> bool:
        """Whether it is this process."""
        return os.getpid() == self.pid

    def require_current(self, what: str, instead: str) -> None:
        """Raise CkptError in a forked child. what: the object; instead: what to do there."""
        if not self.is_current:
            raise CkptError(
                f"{what} belongs to process {self.pid}, and this is process {os.getpid()}, which was forked from it: {instead}"
            )
