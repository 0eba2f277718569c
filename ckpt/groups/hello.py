"""The hello of a rank in a rendezvous: the identity of its process and of the process that started it.

Two jobs without a name at one store look alike: a new job and the remains of an earlier one, or two jobs at the same time. On
one host their launchers distinguish them: torchrun's agent, the proxy of mpiexec, a shell.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from ckpt.groups.process_identity import ProcessIdentity, is_alive, is_dead, process_start_ticks, this_process
from ckpt.storage.base.checked_decode import decode, read_json


@dataclass(frozen=True, slots=True)
class Hello:
    """The hello of one rank."""

    owner: ProcessIdentity
    """The process of the rank."""
    parent: int
    """The process that started it (the launcher). 1 or 0 if that has ended, or is the first process of a container."""
    parent_started: str
    """Start time of the parent, as `ProcessIdentity.started`."""

    def can_be_alive(self, me: Hello) -> bool:
        """Return whether the process of the rank may be alive. me: the hello of this process, here and below."""
        return not is_dead(self.owner, me.owner)

    def has_same_launcher(self, me: Hello) -> bool | None:
        """Return whether one process started both ranks; None if that is unknown."""
        if not is_alive(self.owner, me.owner) or me.parent <= 1 or not me.parent_started:
            return None
        return (self.parent, self.parent_started) == (me.parent, me.parent_started)

    def is_orphaned(self, me: Hello) -> bool:
        """Return whether the launcher of the rank is known to have ended, and is another one: a rank left from a killed job.

        A launcher that had ended before the hello was written is unknown: it may have been the first process of a container.
        """
        return (
            self.has_same_launcher(me) is False
            and self.parent > 1
            and process_start_ticks(self.parent, raise_unreadable=True) != self.parent_started
        )

    def encode(self) -> bytes:
        """Return the hello as the content of an object in the store."""
        return json.dumps({**asdict(self.owner), "parent": self.parent, "parent_started": self.parent_started}).encode()


def own_hello() -> Hello:
    """Return the hello of this process; call it before waiting, since the parent may end meanwhile."""
    parent = os.getppid()
    return Hello(this_process(), parent, process_start_ticks(parent))


def decode_hello(data: bytes | None) -> Hello | None:
    """Return the hello in `data`; None if it is missing or malformed."""
    try:
        fields = read_json(data or b"")
        parent, since = fields.pop("parent"), fields.pop("parent_started")
        return Hello(decode(ProcessIdentity, fields), parent, since)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
