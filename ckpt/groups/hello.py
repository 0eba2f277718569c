"""What a rank says of itself when it comes to a meeting: which process it is, and what has started it.

Where nothing names a job, two of them at one store look alike: one just started, and what is left of the one before; or two at
the same time. On one host their launchers tell them apart: torchrun's agent, the proxy of mpiexec, a shell.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from ckpt.process_identity import Owner, alive, is_dead, started, this_process
from ckpt.storage.decode import decode, read_json


@dataclass(frozen=True, slots=True)
class Hello:
    """Of one rank."""

    owner: Owner
    parent: int
    """The process that has started it, 1 or 0 where that is not known any more."""
    parent_started: str

    def lives(self, me: Hello) -> bool:
        """Whether its process may live."""
        return not is_dead(self.owner, me.owner)

    def is_of(self, me: Hello) -> bool | None:
        """Whether one process has started both; None where that can't be told."""
        if not alive(self.owner, me.owner) or me.parent <= 1 or not me.parent_started:
            return None
        return (self.parent, self.parent_started) == (me.parent, me.parent_started)

    def is_left_over(self, me: Hello) -> bool:
        """Whether what has started it is gone, while that of this process lives: of a job that was killed, and begun again."""
        return self.is_of(me) is False and self.parent > 1 and started(self.parent, must_look=True) != self.parent_started

    def encoded(self) -> bytes:
        """As an object of a meeting."""
        return json.dumps({**asdict(self.owner), "parent": self.parent, "parent_started": self.parent_started}).encode()


def hello() -> Hello:
    """Of this process, before it waits: its parent may end meanwhile."""
    parent = os.getppid()
    return Hello(this_process(), parent, started(parent))


def decoded(data: bytes | None) -> Hello | None:
    """What was said; None where that is gone, or says nothing."""
    try:
        said = read_json(data or b"")
        parent, since = said.pop("parent"), said.pop("parent_started")
        return Hello(decode(Owner, said), parent, since)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
