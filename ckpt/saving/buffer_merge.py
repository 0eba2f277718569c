"""Decides for the committer which ranks have buffers of their own in a step, from what each rank has published."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import MAX_NAMED_LEAVES
from ckpt.groups.base import ranks_text
from ckpt.saving.buffer_shares import OWN_BUFFER_BYTES
from ckpt.saving.packed_names import pack_names, unpack_names
from ckpt.state.rank_tree import own_name
from ckpt.storage.base.forks import fork_safe_lock

log = logging.getLogger("ckpt")

_warned_urls: set[str] = set()
"""The repositories for which this process has logged a warning about large buffers."""
_warned_lock = fork_safe_lock()
"""Guards `_warned_urls`."""


@dataclass(frozen=True, slots=True)
class PublishedBuffers:
    """What a rank publishes of its buffers, by name: digests of those that it stores, and samples of larger ones."""

    first: Mapping[str, bytes]
    """Digests of those that it stores for all ranks."""
    own: Mapping[str, bytes]
    """Digests of those that it stores for itself."""
    large: Mapping[str, bytes]
    """Digests of samples of those of which only the first rank stores its own."""
    layouts: Sequence[str]
    """The layouts of the sharded arrays of the rank (`ArrayLeaf.layout`)."""

    def encode(self) -> str:
        """Return the text in the metadata of the rank's part; "" for a rank without buffers."""
        if not (self.first or self.own or self.large):
            return ""
        packed = [[pack_names(list(part)), base64.b64encode(b"".join(part.values())).decode()] for part in self._parts()]
        return json.dumps([*packed, list(self.layouts)])

    def _parts(self) -> tuple[Mapping[str, bytes], ...]:
        return self.first, self.own, self.large


def decode_buffers(text: str) -> PublishedBuffers:
    """Return the buffers that a text of `PublishedBuffers.encode` describes."""
    if not text:
        return PublishedBuffers({}, {}, {}, ())
    *packed, layouts = json.loads(text)
    first, own, large = (_unpack(*part) for part in packed)
    return PublishedBuffers(first, own, large, layouts)


def _unpack(packed_names: str, digests: str) -> dict[str, bytes]:
    names, data = unpack_names(packed_names), base64.b64decode(digests)
    nbytes = len(data) // max(1, len(names))
    return {name: data[i * nbytes : (i + 1) * nbytes] for i, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class MergedBuffers:
    """The buffers of all ranks in one step."""

    left_out: frozenset[str]
    """The names of own buffers that equal those of the first rank, so that the step does not list them."""
    ranks: Mapping[str, Sequence[int]]
    """By the name of a buffer: the ranks that have another value than the first rank, in ascending order."""
    layouts: Sequence[str]
    """The layouts of the sharded arrays of all ranks."""
    warning: str
    """A message about large buffers that differ; "" if none do."""


def merge_buffers(published: Iterable[tuple[int, str]]) -> MergedBuffers:
    """Return the buffers of a step. This is a pure function.

    published: each rank with the text that it has published.
    """
    by_rank = [(rank, decode_buffers(text)) for rank, text in sorted(published) if text]
    first: dict[str, bytes] = {}
    for _, of_rank in by_rank:
        for name, found in of_rank.first.items():
            first.setdefault(name, found)
    left_out: set[str] = set()
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in by_rank:
        for name, found in of_rank.own.items():
            if first.get(name) == found:
                left_out.add(own_name(name, rank))
            else:
                ranks.setdefault(name, []).append(rank)
    layouts = sorted({layout for _, of_rank in by_rank for layout in of_rank.layouts}) if ranks else []
    return MergedBuffers(frozenset(left_out), ranks, layouts, _large_text(((rank, b.large) for rank, b in by_rank), first))


def _large_text(samples_by_rank: Iterable[tuple[int, Mapping[str, bytes]]], stored: Mapping[str, bytes]) -> str:
    """Return a message that names the large buffers whose samples differ between ranks; "" if none do.

    stored: the digests of those that the first rank stores for all. A later rank has samples of such a buffer if the buffer is
        a view of a larger array there. Samples cannot be compared with digests, so they count as different.
    """
    first = dict(stored)
    differing: dict[str, list[int]] = {}
    for rank, samples in samples_by_rank:
        for name, sample in samples.items():
            if first.setdefault(name, sample) != sample:
                differing.setdefault(name, []).append(rank)
    if not differing:
        return ""
    named = ", ".join(f"{name} on {ranks_text(ranks)}" for name, ranks in list(differing.items())[:MAX_NAMED_LEAVES])
    more = f" and {len(differing) - MAX_NAMED_LEAVES} more" if len(differing) > MAX_NAMED_LEAVES else ""
    return (
        f"buffers differ from the stored ones of the first rank: {named}{more}. They are parts or views of arrays, or beyond "
        f"{OWN_BUFFER_BYTES >> 20} MiB of a rank: wrap them in ckpt.PerRank"
    )


def warn_of_large_buffers(step: int, url: str, text: str) -> None:
    """Log the warning of `merge_buffers`, once for each repository. text: "" for none."""
    if not text:
        return
    with _warned_lock:
        if url in _warned_urls:
            return
        _warned_urls.add(url)
    log.warning("step %d of %s: %s", step, url, text)
