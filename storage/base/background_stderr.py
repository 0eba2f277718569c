"""Writes the standard error of a process in a thread, so that a terminal or pipe that nobody reads blocks only this thread."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import queue
import select
import sys
import threading
from typing import TYPE_CHECKING

from ckpt.storage.base.threads import try_start

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FINISH_SECONDS = 1.0
"""How long the end of the process waits for the last messages to be written. After that they are lost."""
_MAX_CHUNKS = 10_000
"""While nobody reads, at most so many messages are kept. Older ones are lost."""


def write_stderr_in_background() -> None:
    """Replace `sys.stderr` by a stream to the same file whose writes never wait. Call this once, early in a process.

    Messages of `logging` and `warnings` are written by it, too.
    """
    if sys.stderr is None:  # the descriptor was closed before the process began
        return
    output = _QueuedOutput(sys.stderr.fileno())
    sys.stderr = io.TextIOWrapper(output, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)
    atexit.register(finish_stderr)


def finish_stderr() -> None:
    """Wait a moment until the last messages are written. Only a process that ends by `os._exit` needs to call it."""
    output = getattr(sys.stderr, "buffer", None)
    if isinstance(output, _QueuedOutput):
        output.finish()


class _QueuedOutput(io.RawIOBase):
    """A raw stream whose thread writes to a descriptor. Any thread and any signal handler may write to the stream.

    Without the thread (none could be started, a forked child, the end of the process) a write waits for the reader.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # A SimpleQueue is reentrant: a signal handler may write while its thread does.
        self._chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ckpt-stderr", daemon=True)
        try_start(self._thread)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        """Queue some bytes and return their number."""
        chunk = bytes(data)
        if not self._thread.is_alive():
            self._write_all(chunk)
            return len(chunk)
        if self._chunks.qsize() >= _MAX_CHUNKS:
            with contextlib.suppress(queue.Empty):
                self._chunks.get_nowait()
        self._chunks.put(chunk)
        return len(chunk)

    def finish(self) -> None:
        """End the thread after the last message, and wait for this, but not for long."""
        if self._thread.is_alive():
            self._chunks.put(None)
            self._thread.join(_FINISH_SECONDS)

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            # If the terminal is gone, the disk is full or memory is short, this message is lost, and the next one is tried.
            with contextlib.suppress(OSError, MemoryError):
                self._write_all(chunk)

    def _write_all(self, chunk: bytes) -> None:
        while chunk:
            chunk = chunk[write_when_ready(self._descriptor, chunk) :]


def write_when_ready(descriptor: int, data: bytes) -> int:
    """Write a part of some bytes, and return its length. Waits for the reader, also if the descriptor does not block.

    A terminal or pipe that is shared with another program does not block if that program has set O_NONBLOCK.
    """
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
