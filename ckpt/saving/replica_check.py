"""Whether the copies of a shard are copies. Each rank says what it holds, the committer compares.

Dtype and shape are compared always: of a small array one rank writes all, and the rows say nothing of what others hold. Of the
bytes a sample by default (replica_samples.py): equal names do not make equal copies, and ranks that each write their share of
arrays that differ would store a mixture that none of them had. All bytes on request (`verify_replicas=True`), since every rank
then reads all of its state once more before the save returns.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import StepRefused
from ckpt.format.bounded_decode import inflate
from ckpt.format.digest import checksum, digest
from ckpt.groups.base import ranks_text
from ckpt.saving.replica_samples import Samples, pack_samples, samples_of, unpack_samples
from ckpt.saving.write_plan import LeafSpec
from ckpt.state.boxes import Box, whole_box
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.state.tree import FlatState

_MAX_TEXT_BYTES = 256 << 20
"""The longest description of the copies of one rank, decoded."""

_LEAVES_PER_CALL = 500
"""Leaves of one call that holds the GIL: beside training steps, a millisecond."""

# --- dtype and shape -------------------------------------------------------------------------------------------


class LeafDescription(NamedTuple):
    """What a rank takes a leaf for."""

    rank: int
    dtype: str
    shape: tuple[int, ...]
    """Of the global array."""


def describe_leaves(flat: FlatState) -> str:
    """Name, dtype and global shape of each leaf of which this rank may store nothing; its rows tell of the others.

    One compressed text, the same for ranks that hold the same: of ten thousand the committer opens a few.
    """
    return _compressed_text([(name, leaf.dtype, leaf.shape) for name, leaf in _possibly_unstored(flat)])


def describe_sharers(flat: FlatState) -> str:
    """The sets of ranks that divide copies of the same leaves, this rank being one of each: by set the names of those that have
    elements, in a text. Ranks of a set have one text; where they have several, the committer looks which leaf one lacks."""
    names: dict[str, list[str]] = {}
    for name, leaf in _possibly_unstored(flat):
        if 0 not in leaf.shape:
            for sharer in _sharer_names(leaf):
                names.setdefault(sharer, []).append(name)
    return json.dumps({sharer: _compressed_text(those) for sharer, those in names.items()})


def _possibly_unstored(flat: FlatState) -> Iterator[tuple[str, ArrayLeaf]]:
    for name, leaf in flat.leaves.items():
        if name not in flat.per_rank and not _is_stored(leaf):
            yield name, leaf


def _compressed_text(items: Sequence[object]) -> str:
    some = (items[i : i + _LEAVES_PER_CALL] for i in range(0, len(items), _LEAVES_PER_CALL))
    text = ",".join(json.dumps(part)[1:-1] for part in some)
    return base64.b64encode(zlib.compress(f"[{text}]".encode(), 1)).decode()


def _is_stored(leaf: ArrayLeaf) -> bool:
    """Whether this rank stores something of a leaf for sure."""
    return any(part.replica.total == 1 and part.leaf.nbytes for part in leaf.shards() or ())


_ALL_RANKS = "all"


def _sharer_names(leaf: ArrayLeaf) -> list[str]:
    """The sets of ranks that divide copies of a leaf among them, this rank being one of each."""
    parts = leaf.shards()
    if parts is None:
        return [_ALL_RANKS]
    return sorted({_rank_set_name(part.replica.ranks) for part in parts if part.replica.total > 1 and part.replica.ranks})


@functools.lru_cache(maxsize=4096)
def _rank_set_name(ranks: tuple[int, ...]) -> str:
    return f"{checksum(repr(ranks).encode()):016x}"


def _parse_text(text: str) -> list[Any]:
    """What was put into a text."""
    found: list[Any] = json.loads(inflate(base64.b64decode(text), _MAX_TEXT_BYTES)) if text else []
    return found


def agreed_descriptions(rank_by_text: Mapping[str, int]) -> dict[str, LeafDescription]:
    """What all ranks take their leaves for, by name; raise StepRefused where two contradict each other.

    told: what `describe` gave, each different text with the lowest rank that told it.
    """
    descriptions: dict[str, LeafDescription] = {}
    for text, rank in rank_by_text.items():
        for name, dtype, shape in _parse_text(text):
            require_same_description(
                name, descriptions.setdefault(name, description := LeafDescription(rank, dtype, tuple(shape))), description
            )
    return descriptions


def require_same_description(name: str, a: LeafDescription, b: LeafDescription) -> None:
    """Raise StepRefused where two ranks take a leaf for different things."""
    if a[1:] != b[1:]:
        raise StepRefused(
            f"leaf {name} is {a.dtype} of global shape {a.shape} on rank {a.rank} and {b.dtype} of global shape {b.shape} on "
            f"rank {b.rank}; give leaves that are not one array different names, or the same global_shape in ckpt.Shard; "
            "what each rank has for itself belongs in ckpt.PerRank"
        )


_MAX_NAMED = 3
"""Leaves in one message."""


def missing_copies_text(
    ranks_by_text: Mapping[str, Sequence[int]], find_storing_ranks: Callable[[Collection[str]], Mapping[str, set[int]]]
) -> str:
    """Which leaves some ranks have, and others that should have copies lack, in words; "" where there is none.

    Ranks with copies divide all of these among them. Where one lacks a leaf the others' cuts are not its own any more, and
    what is then missing is of any leaf, or of none: a small one is written by one rank. told: what `sharers` gave, and the
    ranks that told it; storing: which ranks have stored something of leaves.
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
    more = f" and {len(found) - _MAX_NAMED} more leaves" if len(found) > _MAX_NAMED else ""
    return (
        f"{', '.join(found[:_MAX_NAMED])}{more}, where each should have an equal copy under the same name; "
        "what only some ranks "
        "hold belongs in ckpt.Shard, what each rank has for itself in ckpt.PerRank"
    )


def _partly_missing_leaves(by_text: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, set[int], set[int]]]:
    """Leaves that some ranks of a set named, and others did not; with those and these."""
    members = {rank for tellers in by_text.values() for rank in tellers}
    ranks_by_leaf: dict[str, set[int]] = {}
    for text, ranks in by_text.items():
        for name in _parse_text(text):
            ranks_by_leaf.setdefault(name, set()).update(ranks)
    for name, those in ranks_by_leaf.items():
        if those != members:
            yield name, those, members - those


# --- bytes -----------------------------------------------------------------------------------------------------

ReplicaDigests = list[tuple[str, list[int], list[int], str]]
"""Name, offset, shape and digest of each shard of which there are several copies."""


class PublishedDigests(NamedTuple):
    """What a rank publishes of the bytes of its copies."""

    verify: bool | None
    """The option `verify_replicas`: everything, nothing, or a sample (None)."""
    replica_digests: ReplicaDigests
    samples: Samples

    def metadata(self, flat: FlatState) -> dict[str, str]:
        """For the rank's part of the step. Ranks that hold the same bytes have the same text."""
        return {
            "verify": json.dumps(self.verify),
            "copies": json.dumps(self.replica_digests),
            "samples": base64.b64encode(pack_samples(self.samples, (name for name, _ in _possibly_unstored(flat)))).decode(),
        }


def compute_digests(
    flat: FlatState, specs: Sequence[LeafSpec], leaves: Sequence[ArrayLeaf], verify: bool | None
) -> PublishedDigests:
    """Read now what the option asks for."""
    return PublishedDigests(
        verify, digest_replicas(specs, leaves) if verify else [], samples_of(flat) if verify is None else {}
    )


def digest_replicas(specs: Sequence[LeafSpec], leaves: Sequence[ArrayLeaf]) -> ReplicaDigests:
    """What this rank holds of shards that others hold as well."""
    found = []
    for spec, leaf in zip(specs, leaves, strict=True):
        if spec.replica is not None and spec.nbytes:
            found.append((spec.name, list(spec.offset), list(spec.shape), digest("xxh3-128", _leaf_bytes(leaf)).hex()))
    return found


def _leaf_bytes(leaf: ArrayLeaf) -> Bytes:
    if leaf.flat is not None:
        return leaf.flat
    out = np.empty(leaf.nbytes, np.uint8)
    leaf.read(whole_box(leaf.shape), out)
    return out


def require_equal_replicas(digests_by_rank: Sequence[tuple[int, ReplicaDigests]]) -> None:
    """Raise StepRefused for the first shard of which two ranks hold different bytes. told: by rank."""
    first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, str]] = {}
    for rank, copies in digests_by_rank:
        for name, offset, shape, found in copies:
            other, expected = first.setdefault((name, tuple(offset), tuple(shape)), (rank, found))
            if expected != found:
                raise StepRefused(
                    f"leaf {name}{_box_text(Box(tuple(offset), tuple(shape)))} differs between rank {other} and "
                    f"rank {rank}, which should hold equal copies. Find out where they drifted apart; what each rank has for "
                    "itself belongs in ckpt.PerRank"
                )


def _box_text(box: Box) -> str:
    return "" if not any(box.offset) else f" at {list(box.offset)} of shape {list(box.shape)}"


def require_equal_samples(ranks_by_texts: Mapping[tuple[str, str], Sequence[int]]) -> None:
    """Raise StepRefused where ranks have arrays of one name whose samples differ. told: what `describe` gave with the text of
    the samples, and the ranks that published both."""
    if len(ranks_by_texts) < 2:  # the usual case: all ranks hold the same
        return
    found: dict[str, dict[bytes, list[int]]] = {}
    for (described, text), ranks in ranks_by_texts.items():
        for name, sample in unpack_samples(base64.b64decode(text), [name for name, _, _ in _parse_text(described)]).items():
            found.setdefault(name, {}).setdefault(sample, []).extend(ranks)
    differing = [
        f"leaf {name} holds other bytes on {_differing_ranks_text(by.values())}" for name, by in found.items() if len(by) > 1
    ]
    if differing:
        more = f" and {len(differing) - _MAX_NAMED} more leaves" if len(differing) > _MAX_NAMED else ""
        raise StepRefused(
            f"{', '.join(differing[:_MAX_NAMED])}{more}; arrays of one name must be equal copies on all ranks. Declare what "
            "each rank has for itself, such as its experts, with ckpt.PerRank, and parts of one array with ckpt.Shard; for the "
            "buffers of a torch module put the module itself in the state instead of its state_dict(), so that they come from "
            "rank 0; find out where copies that should be equal drifted apart. verify_replicas=False saves a mixture of what "
            "the ranks hold, without this comparison"
        )


def _differing_ranks_text(holders: Collection[Sequence[int]]) -> str:
    """Which ranks hold something else than the first one."""
    first, *others = sorted(sorted(ranks) for ranks in holders)
    return f"{ranks_text(sorted(rank for ranks in others for rank in ranks))} than on {ranks_text(first)}"
