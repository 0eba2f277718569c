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

from ckpt.bounded_decode import inflated
from ckpt.digest import checksum, digest
from ckpt.groups.base import ranks_text
from ckpt.leaves.base import ArrayLeaf, Bytes
from ckpt.plan import LeafSpec
from ckpt.replica_samples import Samples, packed, samples_of, unpacked
from ckpt.shard import Box, whole
from ckpt.storage.errors import StepRefused
from ckpt.tree import Flat

_TEXT_BYTES = 256 << 20
"""The longest description of the copies of one rank, decoded."""

_TOGETHER = 500
"""Leaves of one call that holds the GIL: beside training steps, a millisecond."""

# --- dtype and shape -------------------------------------------------------------------------------------------


class Described(NamedTuple):
    """What a rank takes a leaf for."""

    rank: int
    dtype: str
    shape: tuple[int, ...]
    """Of the global array."""


def describe(flat: Flat) -> str:
    """Name, dtype and global shape of each leaf of which this rank may store nothing; its rows tell of the others.

    One compressed text, the same for ranks that hold the same: of ten thousand the committer opens a few.
    """
    return _text([(name, leaf.dtype, leaf.shape) for name, leaf in _uncertain(flat)])


def sharers(flat: Flat) -> str:
    """The sets of ranks that divide copies of the same leaves, this rank being one of each: by set the names of those that have
    elements, in a text. Ranks of a set have one text; where they have several, the committer looks which leaf one lacks."""
    names: dict[str, list[str]] = {}
    for name, leaf in _uncertain(flat):
        if 0 not in leaf.shape:
            for sharer in _sharers(leaf):
                names.setdefault(sharer, []).append(name)
    return json.dumps({sharer: _text(those) for sharer, those in names.items()})


def _uncertain(flat: Flat) -> Iterator[tuple[str, ArrayLeaf]]:
    for name, leaf in flat.leaves.items():
        if name not in flat.own and not _is_stored(leaf):
            yield name, leaf


def _text(told: Sequence[object]) -> str:
    some = (told[i : i + _TOGETHER] for i in range(0, len(told), _TOGETHER))
    text = ",".join(json.dumps(part)[1:-1] for part in some)
    return base64.b64encode(zlib.compress(f"[{text}]".encode(), 1)).decode()


def _is_stored(leaf: ArrayLeaf) -> bool:
    """Whether this rank stores something of a leaf for sure."""
    return any(part.replica.of == 1 and part.leaf.nbytes for part in leaf.parts() or ())


_EVERYONE = "all"


def _sharers(leaf: ArrayLeaf) -> list[str]:
    """The sets of ranks that divide copies of a leaf among them, this rank being one of each."""
    parts = leaf.parts()
    if parts is None:
        return [_EVERYONE]
    return sorted({_name_of(part.replica.ranks) for part in parts if part.replica.of > 1 and part.replica.ranks})


@functools.lru_cache(maxsize=4096)
def _name_of(ranks: tuple[int, ...]) -> str:
    return f"{checksum(repr(ranks).encode()):016x}"


def _told(text: str) -> list[Any]:
    """What was put into a text."""
    found: list[Any] = json.loads(inflated(base64.b64decode(text), _TEXT_BYTES)) if text else []
    return found


def agreed(told: Mapping[str, int]) -> dict[str, Described]:
    """What all ranks take their leaves for, by name; raise StepRefused where two contradict each other.

    told: what `describe` gave, each different text with the lowest rank that told it.
    """
    known: dict[str, Described] = {}
    for text, rank in told.items():
        for name, dtype, shape in _told(text):
            require_same(name, known.setdefault(name, mine := Described(rank, dtype, tuple(shape))), mine)
    return known


def require_same(name: str, a: Described, b: Described) -> None:
    """Raise StepRefused where two ranks take a leaf for different things."""
    if a[1:] != b[1:]:
        raise StepRefused(
            f"leaf {name} is {a.dtype} of global shape {a.shape} on rank {a.rank} and {b.dtype} of global shape {b.shape} on "
            f"rank {b.rank}; give leaves that are not one array different names, or the same global_shape in ckpt.Shard; "
            "what each rank has for itself belongs in ckpt.PerRank"
        )


_NAMED = 3
"""Leaves in one message."""


def lacking(told: Mapping[str, Sequence[int]], storing: Callable[[Collection[str]], Mapping[str, set[int]]]) -> str:
    """Which leaves some ranks have, and others that should have copies lack, in words; "" where there is none.

    Ranks with copies divide all of these among them. Where one lacks a leaf the others' cuts are not its own any more, and
    what is then missing is of any leaf, or of none: a small one is written by one rank. told: what `sharers` gave, and the
    ranks that told it; storing: which ranks have stored something of leaves.
    """
    texts: dict[str, dict[str, list[int]]] = {_EVERYONE: {}}
    for said, tellers in told.items():
        for sharer, text in {_EVERYONE: "", **json.loads(said)}.items():
            texts.setdefault(sharer, {}).setdefault(text, []).extend(tellers)
    lacked = [one for by_text in texts.values() if len(by_text) > 1 for one in _lacked(by_text)]
    stored = storing({name for name, _, _ in lacked}) if lacked else {}
    found = []
    for name, those, others in lacked:
        if without := others - stored.get(name, set()):
            found.append(f"leaf {name} is on {ranks_text(sorted(those))} but not on {ranks_text(sorted(without))}")
    if not found:
        return ""
    more = f" and {len(found) - _NAMED} more leaves" if len(found) > _NAMED else ""
    return (
        f"{', '.join(found[:_NAMED])}{more}, where each should have an equal copy under the same name; what only some ranks "
        "hold belongs in ckpt.Shard, what each rank has for itself in ckpt.PerRank"
    )


def _lacked(by_text: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, set[int], set[int]]]:
    """Leaves that some ranks of a set named, and others did not; with those and these."""
    members = {rank for tellers in by_text.values() for rank in tellers}
    having: dict[str, set[int]] = {}
    for text, tellers in by_text.items():
        for name in _told(text):
            having.setdefault(name, set()).update(tellers)
    for name, those in having.items():
        if those != members:
            yield name, those, members - those


# --- bytes -----------------------------------------------------------------------------------------------------

Copies = list[tuple[str, list[int], list[int], str]]
"""Name, offset, shape and digest of each shard of which there are several copies."""


class Digests(NamedTuple):
    """What a rank publishes of the bytes of its copies."""

    verify: bool | None
    """The option `verify_replicas`: everything, nothing, or a sample (None)."""
    copies: Copies
    samples: Samples

    def metadata(self, flat: Flat) -> dict[str, str]:
        """For the rank's part of the step. Ranks that hold the same bytes have the same text."""
        return {
            "verify": json.dumps(self.verify),
            "copies": json.dumps(self.copies),
            "samples": base64.b64encode(packed(self.samples, (name for name, _ in _uncertain(flat)))).decode(),
        }


def digests_of(flat: Flat, specs: Sequence[LeafSpec], leaves: Sequence[ArrayLeaf], verify: bool | None) -> Digests:
    """Read now what the option asks for."""
    return Digests(verify, digest_copies(specs, leaves) if verify else [], samples_of(flat) if verify is None else {})


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


def compare(told: Sequence[tuple[int, Copies]]) -> None:
    """Raise StepRefused for the first shard of which two ranks hold different bytes. told: by rank."""
    first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, str]] = {}
    for rank, copies in told:
        for name, offset, shape, found in copies:
            other, known = first.setdefault((name, tuple(offset), tuple(shape)), (rank, found))
            if known != found:
                raise StepRefused(
                    f"leaf {name}{_where(Box(tuple(offset), tuple(shape)))} differs between rank {other} and "
                    f"rank {rank}, which should hold equal copies. Find out where they drifted apart; what each rank has for "
                    "itself belongs in ckpt.PerRank"
                )


def _where(box: Box) -> str:
    return "" if not any(box.offset) else f" at {list(box.offset)} of shape {list(box.shape)}"


def require_equal(told: Mapping[tuple[str, str], Sequence[int]]) -> None:
    """Raise StepRefused where ranks have arrays of one name whose samples differ. told: what `describe` gave with the text of
    the samples, and the ranks that published both."""
    if len(told) < 2:  # the usual case: all ranks hold the same
        return
    found: dict[str, dict[bytes, list[int]]] = {}
    for (described, text), ranks in told.items():
        for name, one in unpacked(base64.b64decode(text), [name for name, _, _ in _told(described)]).items():
            found.setdefault(name, {}).setdefault(one, []).extend(ranks)
    differing = [f"leaf {name} holds other bytes on {_apart(by.values())}" for name, by in found.items() if len(by) > 1]
    if differing:
        more = f" and {len(differing) - _NAMED} more leaves" if len(differing) > _NAMED else ""
        raise StepRefused(
            f"{', '.join(differing[:_NAMED])}{more}; arrays of one name must be equal copies on all ranks. Declare what "
            "each rank has for itself, such as its experts, with ckpt.PerRank, and parts of one array with ckpt.Shard; for the "
            "buffers of a torch module put the module itself in the state instead of its state_dict(), so that they come from "
            "rank 0; find out where copies that should be equal drifted apart. verify_replicas=False saves a mixture of what "
            "the ranks hold, without this comparison"
        )


def _apart(holders: Collection[Sequence[int]]) -> str:
    """Which ranks hold something else than the first one."""
    first, *others = sorted(sorted(ranks) for ranks in holders)
    return f"{ranks_text(sorted(rank for ranks in others for rank in ranks))} than on {ranks_text(first)}"
