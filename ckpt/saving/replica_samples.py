"""Computes digests of samples of replicated leaves, so that a save refuses replicas that differ.

Every save of a group computes them while the caller waits, so they must be cheap: all bytes of a small array, and some elements
of a larger one. The choice of the elements depends only on the size, so that all ranks choose the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from ckpt.saving.wrapped_buffers import WrappedPart
from ckpt.state.leaves.base import ArrayLeaf, StridedElements
from ckpt.state.tree import FlatState

FULL_DIGEST_BYTES = 4096
"""The largest array that is digested as a whole. That takes one microsecond, as long as a few cache lines of a larger one."""

RUN_BYTES = 64
"""The size of one run of sampled elements: a cache line."""

_RUN_COUNTS = (4, 1024)  # the least and the most runs of an array
_STRIDE_BYTES = 256 << 10  # the approximate distance from one run to the next

DIGEST_BYTES = 8
_NO_DIGEST = bytes(DIGEST_BYTES)

Samples = dict[str, bytes]
"""A digest for each compared leaf, by name."""


def samples_of(flat: FlatState) -> Samples:
    """Return the digests of the leaves of which every other rank should have an equal replica under the same name.

    It skips shards, leaves that belong to one rank, buffers of modules, and arrays whose framework describes their replicas (a
    DTensor).
    """
    skipped = flat.per_rank | flat.buffers
    return samples_of_leaves({name: leaf for name, leaf in flat.leaves.items() if name not in skipped})


def samples_of_leaves(leaves: Mapping[str, ArrayLeaf]) -> Samples:
    """Return the digests of leaves with all elements of an array; other leaves have none."""
    digest: Any = xxhash.xxh3_64_digest
    found: Samples = {}
    rest: dict[str, ArrayLeaf] = {}
    for name, leaf in leaves.items():
        nbytes = leaf.nbytes
        if (data := leaf.flat) is None or leaf.itemsize == 0:
            rest[name] = leaf
        elif not nbytes:
            continue
        elif nbytes <= FULL_DIGEST_BYTES:
            found[name] = digest(data)
        else:
            found[name] = digest(sampled_elements(nbytes, leaf.itemsize).take_from(data))
    found.update(_digests_of_nonflat_leaves(rest))
    return found


def samples_of_buffers(leaves: Mapping[str, ArrayLeaf], wrapped: Mapping[str, WrappedPart]) -> Samples:
    """Return the digests of buffers, without those elements that PerRank has. wrapped: by name, buffers with such elements."""
    found = samples_of_leaves({name: leaf for name, leaf in leaves.items() if name not in wrapped})
    for name in leaves.keys() & wrapped.keys():
        leaf = leaves[name]
        elements = sampled_elements(leaf.nbytes, leaf.itemsize)
        data = elements.take_from(leaf.flat) if leaf.flat is not None else leaf.read_elements([(leaf, elements)])[0]
        found[name] = xxhash.xxh3_64_digest(wrapped[name].unwrapped_sample(data, elements))
    return dict(sorted(found.items()))


def _digests_of_nonflat_leaves(leaves: Mapping[str, ArrayLeaf]) -> Iterator[tuple[str, bytes]]:
    """Yield the digests of leaves whose bytes are not contiguous in host memory."""
    by_kind: dict[type[ArrayLeaf], list[tuple[str, ArrayLeaf, StridedElements]]] = {}
    for name, leaf in leaves.items():
        if (copy := leaf.full_copy()) is not None and copy.nbytes:
            by_kind.setdefault(type(copy), []).append((name, copy, sampled_elements(copy.nbytes, copy.itemsize)))
    for kind, those in by_kind.items():
        for (name, _, _), data in zip(those, kind.read_elements([(leaf, of) for _, leaf, of in those]), strict=True):
            yield name, xxhash.xxh3_64_digest(data)


@lru_cache(maxsize=4096)
def sampled_elements(nbytes: int, itemsize: int) -> StridedElements:
    """Return which elements of an array are digested: all of a small one, otherwise runs from the first element to the last."""
    count = nbytes // itemsize
    if nbytes <= FULL_DIGEST_BYTES:
        return StridedElements(1, count, 0, 0, np.dtype(f"V{nbytes}"))
    run = max(1, RUN_BYTES // itemsize)
    least, most = _RUN_COUNTS
    runs = max(least, min(most, nbytes // _STRIDE_BYTES, count // run))
    stride = (count - run) // (runs - 1)
    return StridedElements(runs, run, stride, stride * itemsize, np.dtype(f"V{run * itemsize}"))


def pack_samples(samples: Samples, names: Iterator[str]) -> bytes:
    """Return the digests in the order of `names`, with zeros for a name without one."""
    return b"".join(samples.get(name, _NO_DIGEST) for name in names)


def unpack_samples(data: bytes, names: list[str]) -> Samples:
    """Return the digests by name, from the result of `pack_samples`."""
    digests = [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]
    return {name: one for name, one in zip(names, digests, strict=True) if one != _NO_DIGEST}
