"""Records which small leaves change from save to save, so that they share no block with unchanging leaves.

A block is written again if one byte of it changes. A plain `state_dict()` does not show which leaves training changes. So each
small leaf counts as unchanging until a save finds that it has changed and other leaves of its block have not. From the next
plan on, it shares blocks only with leaves that change. A block whose leaves all change stays as it is.

The leaves of a block are compared only when the block is written, and no more once all of them are known to change. So a state
that changes completely is digested once more in its first two saves, by the writer threads, and never again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import xxhash

from ckpt.saving.block_plan import Block, BlockPiece, LeafSpec
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.forks import call_in_forked_child, fork_safe_lock

_MAX_BLOCKS = 10_000

_PieceKey = str | tuple[str, tuple[int, ...], int]


class ChangingLeaves:
    """What the saves of this process to one repository have found. Many threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_digests`. Guards changes of `_changing_in_whole_blocks`, `_fully_changing_blocks` and `changing`."""
        self._digests: dict[_PieceKey, int] = {}
        """The digests of unchanging leaves when they were last compared."""
        self._changing_in_whole_blocks: set[str] = set()
        """Leaves that change together with all others of their blocks, while there is no block in which only some change."""
        self._fully_changing_blocks: dict[int, list[BlockPiece]] = {}
        """The pieces of blocks of such leaves, by identity: a plan is the same object from save to save."""
        self.changing: frozenset[str] = frozenset()
        """Names of the leaves that must not share a block with unchanging leaves."""

    def compare_block(self, block: Block, specs: Sequence[LeafSpec], data: Bytes) -> None:
        """Compare the leaves of a block with their digests of the previous save, before the block is written.

        data: the raw bytes of the block.
        """
        pieces = block.pieces
        if len(pieces) < 2 or specs[pieces[0].leaf].kind == "changes":  # there are no leaves to separate
            return
        if self._fully_changing_blocks.get(id(pieces)) is pieces:
            return
        block_specs = [specs[piece.leaf] for piece in pieces]
        if self._changing_in_whole_blocks.issuperset([spec.name for spec in block_specs]):
            with self._lock:
                if not self._changing_in_whole_blocks:  # another thread has just found a block in which only some change
                    return
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


REMEMBERED_REPOSITORIES = 4
"""Of how many repositories and ranks a process remembers its last saves."""

_remembered: dict[tuple[str, int], ChangingLeaves] = {}
call_in_forked_child(_remembered.clear)
_registry_lock = fork_safe_lock()
"""Guards `_remembered`."""


def changing_leaves_of(url_and_rank: tuple[str, int]) -> ChangingLeaves:
    """Return the record of the saves of this rank to this URL; only the last few repositories are remembered."""
    with _registry_lock:
        found = _remembered[url_and_rank] = _remembered.pop(url_and_rank) if url_and_rank in _remembered else ChangingLeaves()
        while len(_remembered) > REMEMBERED_REPOSITORIES:
            del _remembered[next(iter(_remembered))]
        return found
