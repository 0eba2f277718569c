"""Whether the copies of a shard are copies: each rank digests what it holds, the committer compares. On request, since every
rank then reads all of its state once more before the save returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt.digest import digest
from ckpt.leaves.base import ArrayLeaf, Bytes
from ckpt.plan import LeafSpec
from ckpt.shard import Box, whole
from ckpt.storage.errors import StepRefused

Copies = list[tuple[str, list[int], list[int], str]]
"""Name, offset, shape and digest of each shard of which there are several copies."""


def digest_copies(specs: Sequence[LeafSpec], leaves: Sequence[ArrayLeaf]) -> Copies:
    """What this rank holds of shards that others hold as well."""
    found = []
    for spec, leaf in zip(specs, leaves, strict=True):
        if spec.replica is not None and spec.nbytes:
            found.append((spec.name, list(spec.offset), list(spec.shape), digest("xxh3-128", _bytes(leaf)).hex()))
    return found


def _bytes(leaf: ArrayLeaf) -> Bytes:
    if leaf.flat is not None:
        return leaf.flat
    out = np.empty(leaf.nbytes, np.uint8)
    leaf.read(whole(leaf.shape), out)
    return out


def compare(step: int, told: Sequence[tuple[int, Copies]]) -> None:
    """Raise StepRefused for the first shard of which two ranks hold different bytes. told: by rank."""
    first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, str]] = {}
    for rank, copies in told:
        for name, offset, shape, found in copies:
            other, known = first.setdefault((name, tuple(offset), tuple(shape)), (rank, found))
            if known != found:
                raise StepRefused(
                    f"step {step}: leaf {name}{_where(Box(tuple(offset), tuple(shape)))} differs between rank {other} and "
                    f"rank {rank}, which should hold equal copies. Find out where they drifted apart; what each rank has for "
                    "itself belongs in ckpt.PerRank"
                )


def _where(box: Box) -> str:
    return "" if not any(box.offset) else f" at {list(box.offset)} of shape {list(box.shape)}"
