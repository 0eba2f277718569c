"""Checks that the replicas of a leaf are equal: each rank publishes what it has, and the committer compares.

Dtype and shape are always compared: one rank writes all of a small array, so the rows do not show what the others have. Of the
bytes, a sample is compared by default (replica_samples.py). Equal names do not guarantee equal replicas, and ranks that each
write their share of arrays that differ would store a mixture that no rank had. All bytes are compared on request
(`verify_replicas=True`), because every rank then reads its whole state once more before the save returns.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ckpt.errors import MAX_NAMED_LEAVES, StepRefused
from ckpt.format.digest import checksum, digest
from ckpt.groups.base import ranks_text
from ckpt.saving.block_plan import LeafSpec
from ckpt.saving.buffer_merge import PublishedBuffers
from ckpt.saving.buffer_shares import BufferDigests, BufferShares
from ckpt.saving.packed_names import pack_names, unpack_names
from ckpt.saving.replica_samples import Samples, pack_samples, samples_of, samples_of_buffers, unpack_samples
from ckpt.saving.wrapped_buffers import WrappedPart
from ckpt.state.boxes import Box, whole_box
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.state.tree import FlatState

# --- dtype and shape -------------------------------------------------------------------------------------------


class LeafDescription(NamedTuple):
    """Dtype and global shape of a leaf on one rank."""

    rank: int
    dtype: str
    shape: tuple[int, ...]
    """The shape of the global array."""


def describe_leaves(flat: FlatState) -> str:
    """Return name, dtype and global shape of each leaf of which this rank may store nothing. Its rows describe the others.

    The result is a compressed text, equal on ranks with equal leaves. So the committer decodes only a few of ten thousand
    texts.
    """
    return pack_names([(name, leaf.dtype, leaf.shape) for name, leaf in _possibly_unstored(flat)])


def describe_sharers(flat: FlatState) -> str:
    """Return, for each set of ranks that share replicas with this rank, the names of the shared leaves with elements, as a
    text.

    All ranks of a set should have the same text. If they do not, the committer finds the leaf that one of them lacks.
    """
    names: dict[str, list[str]] = {}
    for name, leaf in _possibly_unstored(flat):
        if 0 not in leaf.shape:
            for sharer in _sharer_names(leaf):
                names.setdefault(sharer, []).append(name)
    return json.dumps({sharer: pack_names(those) for sharer, those in names.items()})


def _possibly_unstored(flat: FlatState) -> Iterator[tuple[str, ArrayLeaf]]:
    for name, leaf in flat.leaves.items():
        if name not in flat.per_rank and not _is_stored(leaf):
            yield name, leaf


def _is_stored(leaf: ArrayLeaf) -> bool:
    """Return whether this rank certainly stores a part of a leaf."""
    return any(part.replica.total == 1 and part.leaf.nbytes for part in leaf.shards() or ())


_ALL_RANKS = "all"


def _sharer_names(leaf: ArrayLeaf) -> list[str]:
    """Return the names of the sets of ranks that share replicas of a leaf with this rank."""
    parts = leaf.shards()
    if parts is None:
        return [_ALL_RANKS]
    return sorted({_rank_set_name(part.replica.ranks) for part in parts if part.replica.total > 1 and part.replica.ranks})


@functools.lru_cache(maxsize=4096)
def _rank_set_name(ranks: tuple[int, ...]) -> str:
    return f"{checksum(repr(ranks).encode()):016x}"


def agreed_descriptions(rank_by_text: Mapping[str, int]) -> dict[str, LeafDescription]:
    """Return the description of each leaf, by name; raise StepRefused if those of two ranks differ.

    rank_by_text: the results of `describe_leaves`, each different text with the lowest rank that published it.
    """
    descriptions: dict[str, LeafDescription] = {}
    for text, rank in rank_by_text.items():
        for name, dtype, shape in unpack_names(text):
            require_same_description(
                name, descriptions.setdefault(name, description := LeafDescription(rank, dtype, tuple(shape))), description
            )
    return descriptions


def require_same_description(name: str, a: LeafDescription, b: LeafDescription) -> None:
    """Raise StepRefused if a leaf has another dtype or shape on two ranks."""
    if a[1:] != b[1:]:
        raise StepRefused(
            f"leaf {name} is {a.dtype} {a.shape} on rank {a.rank} and {b.dtype} {b.shape} on rank {b.rank}; rename one or use "
            "ckpt.PerRank, and give all shards of one array the same global_shape"
        )


def missing_copies_text(
    ranks_by_text: Mapping[str, Sequence[int]], find_storing_ranks: Callable[[Collection[str]], Mapping[str, set[int]]]
) -> str:
    """Return a message about leaves that some ranks have and others lack, although all should have replicas; "" if none.

    ranks_by_text: the results of `describe_sharers`, each with the ranks that published it.
    find_storing_ranks: returns which ranks have stored a part of each of the given leaves.

    The ranks of a set split the bytes of all their shared leaves. If one rank lacks a leaf, its cuts differ from those of the
    others. The missing bytes may then belong to any leaf, or to none, because one rank writes all of a small leaf.
    """
    texts: dict[str, dict[str, list[int]]] = {_ALL_RANKS: {}}
    for sharers_text, ranks in ranks_by_text.items():
        for sharer, text in {_ALL_RANKS: "", **json.loads(sharers_text)}.items():
            texts.setdefault(sharer, {}).setdefault(text, []).extend(ranks)
    lacked = [one for by_text in texts.values() if len(by_text) > 1 for one in _partly_missing_leaves(by_text)]
    stored = find_storing_ranks({name for name, _, _ in lacked}) if lacked else {}
    found = []
    for name, those, others in lacked:
        if without := others - stored.get(name, set()):
            found.append(f"leaf {name} is on {ranks_text(sorted(those))} but not on {ranks_text(sorted(without))}")
    if not found:
        return ""
    more = f" and {len(found) - MAX_NAMED_LEAVES} more leaves" if len(found) > MAX_NAMED_LEAVES else ""
    return (
        f"{', '.join(found[:MAX_NAMED_LEAVES])}{more}, where each should have an equal copy under the same name; wrap what "
        "only some ranks have in ckpt.Shard, and what each rank has for itself in ckpt.PerRank"
    )


def _partly_missing_leaves(by_text: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, set[int], set[int]]]:
    """Yield each leaf that only some ranks of a set have, with the ranks that have it and those that lack it."""
    members = {rank for ranks in by_text.values() for rank in ranks}
    ranks_by_leaf: dict[str, set[int]] = {}
    for text, ranks in by_text.items():
        for name in unpack_names(text):
            ranks_by_leaf.setdefault(name, set()).update(ranks)
    for name, those in ranks_by_leaf.items():
        if those != members:
            yield name, those, members - those


# --- bytes -----------------------------------------------------------------------------------------------------


class ReplicaDigest(NamedTuple):
    """The digest of one replica of a shard. The metadata of a rank part has it as a list."""

    name: str
    """The name of the leaf."""
    offset: list[int]
    """The offset of the shard in the whole array, in elements."""
    shape: list[int]
    digest: str


class PublishedDigests(NamedTuple):
    """The digests of a rank's replicas, which it publishes for the committer."""

    verify: bool | None
    """The option `verify_replicas`: all bytes (True), none (False), or a sample (None)."""
    replica_digests: list[ReplicaDigest]
    samples: Samples
    shares: BufferShares
    buffer_samples: Samples
    """The digests of samples of large buffers."""
    buffers: BufferDigests
    """Filled by the writer threads."""

    def metadata(self, flat: FlatState) -> dict[str, str]:
        """Return the metadata of the rank's part of the step. Ranks with equal bytes have equal texts."""
        return {
            "verify": json.dumps(self.verify),
            "copies": json.dumps(self.replica_digests),
            "samples": base64.b64encode(pack_samples(self.samples, (name for name, _ in _possibly_unstored(flat)))).decode(),
            "buffers": self._published_buffers(flat).encode(),
        }

    def _published_buffers(self, flat: FlatState) -> PublishedBuffers:
        digests, shares = self.buffers.by_name(), self.shares
        layouts = sorted({leaf.layout() for leaf in flat.leaves.values()} - {""}) if shares.first or shares.own else []
        first, own = ({name: digests[name] for name in sorted(names)} for names in (shares.first, shares.own))
        return PublishedBuffers(first, own, self.buffer_samples, layouts)


def compute_digests(
    flat: FlatState,
    specs: Sequence[LeafSpec],
    leaves: Sequence[ArrayLeaf],
    verify: bool | None,
    shares: BufferShares,
    rank: int,
) -> PublishedDigests:
    """Read the leaves, and return the digests that `verify` selects. Writer threads add those of stored buffers."""
    samples: Samples = samples_of(flat) if verify is None else {}
    of_buffers = samples_of_buffers(shares.large, shares.wrapped) if verify is None else {}
    copies = digest_replicas(specs, leaves, shares.wrapped) if verify else []
    return PublishedDigests(verify, copies, samples, shares, of_buffers, BufferDigests(shares, rank))


def digest_replicas(
    specs: Sequence[LeafSpec], leaves: Sequence[ArrayLeaf], wrapped: Mapping[str, WrappedPart]
) -> list[ReplicaDigest]:
    """Return the digests of all shards of this rank that have several replicas, without the elements that PerRank has.

    wrapped: by name, buffers with such elements.
    """
    found = []
    for spec, leaf in zip(specs, leaves, strict=True):
        part = wrapped.get(spec.name)
        if spec.replica is None or not spec.nbytes or (part is not None and part.is_whole):
            continue
        data = _leaf_bytes(leaf) if part is None else part.unwrapped_bytes(_leaf_bytes(leaf))
        found.append(ReplicaDigest(spec.name, list(spec.offset), list(spec.shape), digest("xxh3-128", data).hex()))
    return found


def _leaf_bytes(leaf: ArrayLeaf) -> Bytes:
    if leaf.flat is not None:
        return leaf.flat
    out = np.empty(leaf.nbytes, np.uint8)
    leaf.read(whole_box(leaf.shape), out)
    return out


def require_equal_replicas(digests_by_rank: Sequence[tuple[int, Sequence[ReplicaDigest]]]) -> None:
    """Raise StepRefused for the first shard that differs between two ranks."""
    first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, str]] = {}
    for rank, copies in digests_by_rank:
        for name, offset, shape, found in copies:
            other, expected = first.setdefault((name, tuple(offset), tuple(shape)), (rank, found))
            if expected != found:
                raise StepRefused(
                    f"leaf {name}{_box_text(Box(tuple(offset), tuple(shape)))} differs between rank {other} and "
                    f"rank {rank}, which should have equal copies; find out why, or wrap a value that each rank has for itself "
                    "in ckpt.PerRank"
                )


def _box_text(box: Box) -> str:
    return "" if not any(box.offset) else f" at {list(box.offset)} of shape {list(box.shape)}"


def require_equal_samples(ranks_by_texts: Mapping[tuple[str, str], Sequence[int]]) -> None:
    """Raise StepRefused if the samples of arrays of one name differ between ranks.

    ranks_by_texts: the results of `describe_leaves` and the texts of the samples, each pair with the ranks that published it.
    """
    if len(ranks_by_texts) < 2:  # the usual case: all ranks have equal bytes
        return
    found: dict[str, dict[bytes, list[int]]] = {}
    for (described, text), ranks in ranks_by_texts.items():
        for name, sample in unpack_samples(base64.b64decode(text), [name for name, _, _ in unpack_names(described)]).items():
            found.setdefault(name, {}).setdefault(sample, []).extend(ranks)
    differing = [
        f"leaf {name} has other bytes on {_differing_ranks_text(by.values())}" for name, by in found.items() if len(by) > 1
    ]
    if differing:
        more = f" and {len(differing) - MAX_NAMED_LEAVES} more leaves" if len(differing) > MAX_NAMED_LEAVES else ""
        raise StepRefused(
            f"{', '.join(differing[:MAX_NAMED_LEAVES])}{more}; use ckpt.PerRank for own values, ckpt.Shard for parts, "
            "the module itself for buffers, or verify_replicas=False"
        )


def _differing_ranks_text(owners: Collection[Sequence[int]]) -> str:
    """Return a text that names the ranks whose bytes differ from those of the first rank."""
    first, *others = sorted(sorted(ranks) for ranks in owners)
    return f"{ranks_text(sorted(rank for ranks in others for rank in ranks))} than on {ranks_text(first)}"
