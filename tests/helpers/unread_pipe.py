"""A pipe that nobody reads, as an output of a process whose reader has stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """A context with the read end and the write end of a full pipe. A write to it waits until somebody reads."""
    read_end, write_end = os.pipe()
    try:
        os.set_blocking(write_end, False)
        with suppress(BlockingIOError):
            while True:
                os.write(write_end, b"." * 4096)
        os.set_blocking(write_end, True)
        yield read_end, write_end
    finally:
        os.close(read_end)
        os.close(write_end)
