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

from ckpt.saving.write_plan import Block, BlockPiece, LeafSpec
from ckpt.state.leaves.base import Bytes

_MAX_BLOCKS = 10_000

_PieceKey = str | tuple[str, tuple[int, ...], int]


class ChangingLeaves:
    """What the saves of this process to one place have found. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[_PieceKey, int] = {}
        """Of leaves that stay, when they were last looked at."""
        self._changing_in_whole_blocks: set[str] = set()
        """Leaves that change, as do all others of their blocks, while no block is known in which others stay."""
        self._fully_changing_blocks: dict[int, list[BlockPiece]] = {}
        """The pieces of blocks of such leaves, by identity: a plan is the same object from save to save."""
        self.changing: frozenset[str] = frozenset()
        """Names of the leaves that are to be kept from those that stay."""

    def compare_block(self, block: Block, specs: Sequence[LeafSpec], data: Bytes) -> None:
        """Compare the leaves of a block that is to be written with what they were. data: its raw bytes."""
        pieces = block.pieces
        if len(pieces) < 2 or specs[pieces[0].leaf].kind == "changes":  # there is nothing to keep from each other
            return
        if self._fully_changing_blocks.get(id(pieces)) is pieces:
            return
        block_specs = [specs[piece.leaf] for piece in pieces]
        if self._changing_in_whole_blocks.issuperset([spec.name for spec in block_specs]):
            if len(self._fully_changing_blocks) >= _MAX_BLOCKS:
                self._fully_changing_blocks = {}
            self._fully_changing_blocks[id(pieces)] = pieces
            return
        digests = [xxhash.xxh3_64_intdigest(data[p.start : p.start + p.nbytes].data) for p in pieces]
        keys = [_piece_key(spec, piece.begin) for spec, piece in zip(block_specs, pieces, strict=True)]
        with self._lock:
            changed = {
                s.name for s, k, d in zip(block_specs, keys, digests, strict=True) if self._digests.setdefault(k, d) != d
            }
            if not changed:
                return
            for spec, key in zip(block_specs, keys, strict=True):
                if spec.name in changed:
                    del self._digests[key]
            if not self.changing and all(spec.name in changed for spec in block_specs):
                self._changing_in_whole_blocks = self._changing_in_whole_blocks | changed
            else:
                self.changing, self._changing_in_whole_blocks = self.changing | changed | self._changing_in_whole_blocks, set()
                self._fully_changing_blocks = {}


def _piece_key(spec: LeafSpec, begin: int) -> _PieceKey:
    return (spec.name, spec.offset, begin) if begin or any(spec.offset) else spec.name


_MAX_REMEMBERED = 4
_remembered: dict[tuple[str, int], ChangingLeaves] = {}
_registry_lock = threading.Lock()


def changing_leaves_of(url_and_rank: tuple[str, int]) -> ChangingLeaves:
    """What is known of saves to this URL by this rank; kept for the last few places only."""
    with _registry_lock:
        found = _remembered[url_and_rank] = _remembered.pop(url_and_rank) if url_and_rank in _remembered else ChangingLeaves()
        while len(_remembered) > _MAX_REMEMBERED:
            del _remembered[next(iter(_remembered))]
        return found
