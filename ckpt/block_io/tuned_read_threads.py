"""Which reads of a store a tuner controls, and with how many threads: those whose best way depends on the device behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ckpt.block_io.read_plan import BlockRead
from ckpt.block_io.read_threads import run_from_queue, run_in_threads
from ckpt.block_io.replicated_store import copies_of
from ckpt.format.limits import BLOCK_BYTES
from ckpt.storage.base.store import Store
from ckpt.storage.tuning.device_kinds import DISK, NETWORK, of_whole_blocks
from ckpt.storage.tuning.learned_choices import remember, shared_tuner
from ckpt.storage.tuning.measured_reads import Tuner

ReadKind = Literal["streamed", "whole"]
"""`streamed`: blocks that are copied to their targets in chunks. `whole`: blocks that a thread has in memory as a whole."""

_MAX_WHOLE_BLOCK_REQUESTS = 16
"""The most threads with memory for a whole block, as stored and as decoded: 256 MiB in all."""


@dataclass(frozen=True, slots=True)
class TunedReads:
    """How blocks of one kind are read from one device: by threads with one queue, as a tuner decides."""

    tuner: Tuner
    device: str
    is_remote: bool
    max_threads: int
    """The most requests that any choice of the tuner has in flight; each needs a thread."""

    @property
    def threads(self) -> int:
        """The number of threads: one for each request in flight. More threads would only pass the requests to each other."""
        return self.tuner.choice.requests

    @property
    def request_bytes(self) -> int:
        """The length of the next request."""
        return self.tuner.choice.request_bytes

    def remember(self) -> None:
        """Keep the choices of the tuner for the next process."""
        remember(self.device)


def tuned_reads(store: Store, kind: ReadKind) -> TunedReads | None:
    """Return how to read blocks of a store past the page cache or over a network; None if no tuner controls its reads."""
    device = store.device
    if not device:
        return None
    space = NETWORK if store.is_remote else DISK
    if kind == "whole":
        device, space = f"{device}, whole blocks", of_whole_blocks(space, BLOCK_BYTES, _MAX_WHOLE_BLOCK_REQUESTS)
    return TunedReads(shared_tuner(device, space), device, store.is_remote, space.requests[-1])


def read_kind(store: Store, *blocks: BlockRead) -> ReadKind | None:
    """Return how a tuner counts the reads of blocks from the nearest copy of a store; None if no tuner controls them."""
    nearest = copies_of(store)[0]
    if not (nearest.is_remote or (nearest.past_cache and all(block.bypass_cache for block in blocks))):
        return None
    return "streamed" if all(block.can_stream() for block in blocks) else "whole"


def most_threads(store: Store, kind: ReadKind | None) -> int:
    """Return the most threads that may read blocks from any copy of a store; 0 if no tuner controls these reads."""
    return max((reads.max_threads for reads in _tuned_copies(store, kind)), default=0)


def _tuned_copies(store: Store, kind: ReadKind | None) -> list[TunedReads]:
    """Return how to read blocks from each copy of a store whose reads a tuner controls."""
    tuned = [tuned_reads(copy, kind) for copy in copies_of(store)] if kind else []
    return [reads for reads in tuned if reads is not None]


def run_reads(
    store: Store, kind: ReadKind | None, blocks: list[BlockRead], work: Callable[[Iterable[BlockRead]], None],
    *, in_one_thread: bool = False,
) -> None:  # fmt: skip
    """Run `work` on blocks, in the number of threads that is best for a store; the first error stops all and is raised.

    in_one_thread: whether one thread is faster if the store is on this host.
    """
    if not blocks:
        return
    tuned = _tuned_copies(store, kind)
    if in_one_thread and not copies_of(store)[0].is_remote:
        work(blocks)
    elif tuned:
        run_from_queue(blocks, work, lambda: max(reads.threads for reads in tuned))
        for reads in tuned:
            reads.remember()
    else:
        run_in_threads(blocks, work, copies_of(store)[0].parallel_reads)
