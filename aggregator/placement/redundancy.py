"""How often, or how, what is stored is kept more than once: copies (`2x`) or an erasure code (`4+2`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt.storage.base.errors import InvalidArgument

_COPIES = re.compile(r"([1-9]\d?)x")
_CODE = re.compile(r"([1-9]\d?)\+([1-9]\d?)")


@dataclass(frozen=True, slots=True)
class Redundancy:
    """`data` fragments, of which any may be lost as long as `data` of all fragments are left. A copy is a code of 1 + n."""

    data_fragments: int
    parity_fragments: int

    @property
    def total_fragments(self) -> int:
        """Members that a piece of a file needs."""
        return self.data_fragments + self.parity_fragments

    @property
    def min_write_fragments(self) -> int:
        """Members that a write settles for where the others don't take anything: one more may still be lost."""
        return min(self.data_fragments + 1, self.total_fragments)

    @property
    def tolerated_losses(self) -> int:
        """Members that may be lost at once."""
        return self.parity_fragments

    @property
    def overhead(self) -> float:
        """Stored bytes over bytes."""
        return self.total_fragments / self.data_fragments

    def __str__(self) -> str:
        return f"{self.total_fragments}x" if self.data_fragments == 1 else f"{self.data_fragments}+{self.parity_fragments}"


def parse_redundancy(text: str) -> Redundancy:
    """`1x`, `2x`, `3x` … or `k+m`. Raises InvalidArgument."""
    if found := _COPIES.fullmatch(text):
        return Redundancy(1, int(found[1]) - 1)
    if found := _CODE.fullmatch(text):
        data, parity = int(found[1]), int(found[2])
        if data + parity <= 32:
            return Redundancy(data, parity)
    raise InvalidArgument(f"redundancy {text!r}: use 1x, 2x, 3x for copies, or k+m such as 4+2 for an erasure code, k+m <= 32")


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many of the members that keep a register must answer. Any two writes meet in one of them, and so do a write
    and a read."""

    members: int
    write: int
    read: int


def quorum(tolerated_losses: int, available: int) -> Quorum:
    """For registers that are to be there after the loss of `tolerated` of the `available` members of a namespace.

    Three members at least, for a record is small, and a namespace that forgets what it holds is worth nothing.
    """
    members = min(2 * max(1, tolerated_losses) + 1, available)
    write = members // 2 + 1
    return Quorum(members, write, members - write + 1)
