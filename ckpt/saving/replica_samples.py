"""Digests of what each rank has under a name, so that a save refuses arrays that differ where equal copies are expected.

Every save of a group computes them while the caller waits, so they must be cheap: all bytes of a small array, some elements
of a larger one. Which elements depends on the size alone, so that all ranks look at the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from ckpt.state.leaves.base import ArrayLeaf, StridedElements
from ckpt.state.tree import FlatState

FULL_DIGEST_BYTES = 4096
"""An array of at most this size is digested as a whole: one microsecond, as much as a few cache lines of a larger one."""

RUN_BYTES = 64
"""Elements of a larger one are taken in runs of a cache line."""

_RUN_COUNTS = (4, 1024)  # at least, and at most
_STRIDE_BYTES = 256 << 10  # about so far from one run to the next

DIGEST_BYTES = 8
_NO_DIGEST = bytes(DIGEST_BYTES)

Samples = dict[str, bytes]
"""A digest for each compared leaf, by name."""


def samples_of(flat: FlatState) -> Samples:
    """The digests of the leaves of which every other rank with that name should have an equal copy.

    Not of shards, of what belongs to one rank, of what is stored whole from one rank, and of arrays whose framework
    describes their copies (a DTensor).
    """
    digest: Any = xxhash.xxh3_64_digest
    skipped = flat.per_rank | flat.buffers
    found: Samples = {}
    rest: dict[str, ArrayLeaf] = {}
    for name, leaf in flat.leaves.items():
        nbytes = leaf.nbytes
        if (data := leaf.flat) is None or leaf.itemsize == 0:
            rest[name] = leaf
        elif name in skipped or not nbytes:
            continue
        elif nbytes <= FULL_DIGEST_BYTES:
            found[name] = digest(data)
        else:
            found[name] = digest(sampled_elements(nbytes, leaf.itemsize).take_from(data))
    found.update(_digests_of_nonflat_leaves({name: leaf for name, leaf in rest.items() if name not in skipped}))
    return found


def _digests_of_nonflat_leaves(leaves: Mapping[str, ArrayLeaf]) -> Iterator[tuple[str, bytes]]:
    """The digests of leaves whose bytes are not one piece of host memory."""
    by_kind: dict[type[ArrayLeaf], list[tuple[str, ArrayLeaf, StridedElements]]] = {}
    for name, leaf in leaves.items():
        if (copy := leaf.full_copy()) is not None and copy.nbytes:
            by_kind.setdefault(type(copy), []).append((name, copy, sampled_elements(copy.nbytes, copy.itemsize)))
    for kind, those in by_kind.items():
        for (name, _, _), data in zip(those, kind.read_elements([(leaf, of) for _, leaf, of in those]), strict=True):
            yield name, xxhash.xxh3_64_digest(data)


@lru_cache(maxsize=4096)
def sampled_elements(nbytes: int, itemsize: int) -> StridedElements:
    """Which elements of an array are digested: all of a small one, else runs from the first one on to the end."""
    count = nbytes // itemsize
    if nbytes <= FULL_DIGEST_BYTES:
        return StridedElements(1, count, 0, 0, np.dtype(f"V{nbytes}"))
    run = max(1, RUN_BYTES // itemsize)
    least, most = _RUN_COUNTS
    runs = max(least, min(most, nbytes // _STRIDE_BYTES, count // run))
    stride = (count - run) // (runs - 1)
    return StridedElements(runs, run, stride, stride * itemsize, np.dtype(f"V{run * itemsize}"))


def pack_samples(samples: Samples, names: Iterator[str]) -> bytes:
    """The digests in the order of names, zeros for a name without one."""
    return b"".join(samples.get(name, _NO_DIGEST) for name in names)


def unpack_samples(data: bytes, names: list[str]) -> Samples:
    """The other way round."""
    digests = [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]
    return {name: one for name, one in zip(names, digests, strict=True) if one != _NO_DIGEST}
