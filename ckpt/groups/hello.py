"""What a rank says of itself when it comes to a meeting: which process it is, and what has started it.

Where nothing names a job, two of them at one store look alike: one just started, and what is left of the one before; or two at
the same time. On one host their launchers tell them apart: torchrun's agent, the proxy of mpiexec, a shell.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from ckpt.groups.process_identity import ProcessIdentity, is_alive, is_dead, process_start_ticks, this_process
from ckpt.storage.base.checked_decode import decode, read_json


@dataclass(frozen=True, slots=True)
class Hello:
    """Of one rank."""

    owner: ProcessIdentity
    parent: int
    """The process that has started it, 1 or 0 where that is not known any more."""
    parent_started: str

    def can_be_alive(self, me: Hello) -> bool:
        """Whether its process may live."""
        return not is_dead(self.owner, me.owner)

    def has_same_launcher(self, me: Hello) -> bool | None:
        """Whether one process has started both; None where that can't be told."""
        if not is_alive(self.owner, me.owner) or me.parent <= 1 or not me.parent_started:
            return None
        return (self.parent, self.parent_started) == (me.parent, me.parent_started)

    def is_orphaned(self, me: Hello) -> bool:
        """Whether what has started it is gone, while that of this process lives: of a job that was killed, and begun again."""
        return (
            self.has_same_launcher(me) is False
            and self.parent > 1
            and process_start_ticks(self.parent, raise_unreadable=True) != self.parent_started
        )

    def encode(self) -> bytes:
        """As an object of a meeting."""
        return json.dumps({**asdict(self.owner), "parent": self.parent, "parent_started": self.parent_started}).encode()


def own_hello() -> Hello:
    """Of this process, before it waits: its parent may end meanwhile."""
    parent = os.getppid()
    return Hello(this_process(), parent, process_start_ticks(parent))


def decode_hello(data: bytes | None) -> Hello | None:
    """What was said; None where that is gone, or says nothing."""
    try:
        fields = read_json(data or b"")
        parent, since = fields.pop("parent"), fields.pop("parent_started")
        return Hello(decode(ProcessIdentity, fields), parent, since)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
