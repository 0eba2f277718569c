"""The redundancy of stored files: copies (`2x`) or an erasure code (`4+2`), and the quorum sizes of registers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt.storage.base.errors import InvalidArgument

_COPIES = re.compile(r"([1-9]\d?)x")
_CODE = re.compile(r"([1-9]\d?)\+([1-9]\d?)")


@dataclass(frozen=True, slots=True)
class Redundancy:
    """The number of data and parity fragments of each stripe. Any `data_fragments` of them give the stripe back.

    n copies are a code of 1 data fragment and n - 1 parity fragments.
    """

    data_fragments: int
    parity_fragments: int

    @property
    def total_fragments(self) -> int:
        """The number of members that a stripe of a file needs."""
        return self.data_fragments + self.parity_fragments

    @property
    def min_write_fragments(self) -> int:
        """The number of members that a write needs at least. One of them may still be lost, if there is any redundancy."""
        return min(self.data_fragments + 1, self.total_fragments)

    @property
    def tolerated_losses(self) -> int:
        """The number of members that may be lost at once."""
        return self.parity_fragments

    @property
    def overhead(self) -> float:
        """Stored bytes per byte of a file."""
        return self.total_fragments / self.data_fragments

    def __str__(self) -> str:
        return f"{self.total_fragments}x" if self.data_fragments == 1 else f"{self.data_fragments}+{self.parity_fragments}"


def parse_redundancy(text: str) -> Redundancy:
    """Return the redundancy that a text names: `1x`, `2x`, `3x` … or `k+m`. Raises InvalidArgument."""
    if found := _COPIES.fullmatch(text):
        return Redundancy(1, int(found[1]) - 1)
    if found := _CODE.fullmatch(text):
        data, parity = int(found[1]), int(found[2])
        if data + parity <= 32:
            return Redundancy(data, parity)
    raise InvalidArgument(f"redundancy {text!r}: use 1x, 2x, 3x for copies, or k+m such as 4+2 for an erasure code, k+m <= 32")


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many members of a register's replica set must answer a write and a read.

    Any two writes have a member in common, and so do any write and any read.
    """

    members: int
    write: int
    read: int


def quorum(tolerated_losses: int, available: int) -> Quorum:
    """Return the quorum of registers that survive the loss of `tolerated_losses` of the `available` members of a namespace.

    It has at least three members where there are as many: a record is small, and without it the bytes of a file are useless.
    """
    members = min(2 * max(1, tolerated_losses) + 1, available)
    write = members // 2 + 1
    return Quorum(members, write, members - write + 1)
