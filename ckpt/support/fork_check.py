"""Detect that an object is used in a forked child of the process that created it.

The child has a copy of the object without its threads, but with the writer lease and the counters of the parent. Such a copy
must not write.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckpt.storage.base.errors import CkptError


@dataclass(frozen=True, slots=True)
class CreatorProcess:
    """The process that created an object, as a field of that object."""

    pid: int = field(default_factory=os.getpid)

    @property
    def is_current(self) -> bool:
        """Whether it is the current process."""
        return os.getpid() == self.pid

    def require_current(self, what: str, instead: str) -> None:
        """Raise CkptError in a forked child. what: the object; instead: what the user should do in the child."""
        if not self.is_current:
            raise CkptError(
                f"{what} belongs to process {self.pid}, and this is process {os.getpid()}, which was forked from it: {instead}"
            )
