"""Reads a step into the page cache while its load is planned, so that the disk works while its manifest is decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ckpt.format.json_records import StepFile
from ckpt.format.pack import step_of_file
from ckpt.repository.checkpoint import Checkpoint
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.store import Store
from ckpt.storage.base.threads import try_start

_MIN_BYTES = 64 << 20
"""Below this, the plan is ready before a read-ahead helps."""
_CALL_BYTES = 16 << 20
"""The bytes of one read. After each one the thread waits for the interpreter lock, up to 5 ms while Python code runs."""


@contextmanager
def reading_ahead(checkpoint: Checkpoint) -> Iterator[None]:
    """Read the packs of the step from their first byte on while the body runs, if they are on a local disk (`past_cache`).

    A pack is not read if its first page is known to be cached. Packs of earlier steps are not read, as this step may need
    little of them. A load whose `like` has only a part of the step reads some bytes in vain.

    This is a hint: its errors are ignored, and the load reports them when it reads the same bytes. The thread is not waited
    for, so its last read may end after the body.
    """
    packs = [file for file in checkpoint.commit.packs if step_of_file(file.name) == checkpoint.step]
    stopped = threading.Event()
    if checkpoint.store.past_cache and sum(file.nbytes for file in packs) >= _MIN_BYTES:
        arguments = (checkpoint.store, packs, stopped)
        try_start(threading.Thread(target=_read, args=arguments, name="ckpt-read-ahead", daemon=True))
    try:
        yield
    finally:
        stopped.set()


def _read(store: Store, packs: Sequence[StepFile], stopped: threading.Event) -> None:
    with suppress(CkptError, MemoryError):
        buffer = memoryview(bytearray(_CALL_BYTES))
        for file in packs:
            with store.open(file.name) as reader:
                if reader.is_cached(0):
                    continue
                for position in range(0, file.nbytes, _CALL_BYTES):
                    if stopped.is_set():
                        return
                    reader.read_into(position, buffer)
