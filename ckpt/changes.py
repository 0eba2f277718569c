"""Which small leaves change from save to save: those never share a block with leaves that stay as they are.

A block is written again if one byte of it changed. Of a plain `state_dict()` nothing says beforehand what training changes. So
each small leaf counts as one that stays, until a save finds that others of its block have not changed and it has. From the next
plan on it lies with those that change. Where all of a block change it stays as it is.

A block is looked at leaf by leaf only when it has to be written, and not once it is known that all of it changes. So a state of
which all changes is digested once more in its first two saves, by the threads that write, and never again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import xxhash

from ckpt.leaves.base import Bytes
from ckpt.plan import Block, LeafSpec, Piece

_MOST_BLOCKS = 10_000

_Key = str | tuple[str, tuple[int, ...], int]


class Changes:
    """What the saves of this process to one place have found. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[_Key, int] = {}
        """Of leaves that stay, when they were last looked at."""
        self._together: set[str] = set()
        """Leaves that change, as do all others of their blocks, while no block is known in which others stay."""
        self._whole: dict[int, list[Piece]] = {}
        """The pieces of blocks of such leaves, by identity: a plan is the same object from save to save."""
        self.changing: frozenset[str] = frozenset()
        """Names of the leaves that are to be kept from those that stay."""

    def look(self, block: Block, specs: Sequence[LeafSpec], data: Bytes) -> None:
        """Compare the leaves of a block that is to be written with what they were. data: its raw bytes."""
        pieces = block.pieces
        if len(pieces) < 2 or specs[pieces[0].leaf].kind == "changes":  # there is nothing to keep from each other
            return
        if self._whole.get(id(pieces)) is pieces:
            return
        of = [specs[piece.leaf] for piece in pieces]
        if self._together.issuperset([spec.name for spec in of]):
            if len(self._whole) >= _MOST_BLOCKS:
                self._whole = {}
            self._whole[id(pieces)] = pieces
            return
        digests = [xxhash.xxh3_64_intdigest(data[p.start : p.start + p.nbytes].data) for p in pieces]
        keys = [_key(spec, piece.begin) for spec, piece in zip(of, pieces, strict=True)]
        with self._lock:
            changed = {s.name for s, k, d in zip(of, keys, digests, strict=True) if self._digests.setdefault(k, d) != d}
            if not changed:
                return
            for spec, key in zip(of, keys, strict=True):
                if spec.name in changed:
                    del self._digests[key]
            if not self.changing and all(spec.name in changed for spec in of):
                self._together = self._together | changed
            else:
                self.changing, self._together = self.changing | changed | self._together, set()
                self._whole = {}


def _key(spec: LeafSpec, begin: int) -> _Key:
    return (spec.name, spec.offset, begin) if begin or any(spec.offset) else spec.name


_MOST_PLACES = 4
_known: dict[tuple[str, int], Changes] = {}
_registry = threading.Lock()


def changes_of(place: tuple[str, int]) -> Changes:
    """What is known of saves to this URL by this rank; kept for the last few places only."""
    with _registry:
        found = _known[place] = _known.pop(place) if place in _known else Changes()
        while len(_known) > _MOST_PLACES:
            del _known[next(iter(_known))]
        return found
