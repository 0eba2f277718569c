"""Copies of files and of ranges between a namespace and this host, or between namespaces."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.reader import FileReader
from ckpt.aggregator.records.file_record import USUAL_STRIPE_BYTES
from ckpt.storage.base.store import Buffer, Writer

if TYPE_CHECKING:
    from fsspec.callbacks import Callback


def read_file_range(namespace: Namespace, path: str, start: int | None, end: int | None) -> bytes:
    """Return the bytes from `start` to `end` of a file, with the rules of a Python slice: negative ones count from the end."""
    with namespace.open(path) as reader:
        size = reader.file.head.nbytes
        first = 0 if start is None else start if start >= 0 else max(0, size + start)
        last = min(size, size if end is None else end if end >= 0 else max(0, size + end))
        data = bytearray(max(0, last - first))
        reader.read_into(first, memoryview(data))
        return bytes(data)


def append_in_stripes(data: Buffer, writer: Writer) -> None:
    """Append bytes of any length, in parts: a member that takes too long for one append counts as failed."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), USUAL_STRIPE_BYTES):
        writer.append(view[start : start + USUAL_STRIPE_BYTES])


def append_local_file(local_path: str, callback: Callback, writer: Writer) -> None:
    """Append a file of this host to a file that is being written.

    callback: an fsspec callback for the progress.
    """
    with open(local_path, "rb") as source:
        while data := source.read(USUAL_STRIPE_BYTES):
            writer.append(memoryview(data))
            callback.relative_update(len(data))


def append_file(reader: FileReader, writer: Writer) -> None:
    """Append a file of a namespace to a file that is being written, in the same or another namespace."""
    size = reader.file.head.nbytes
    for position in range(0, size, USUAL_STRIPE_BYTES):
        buffer = memoryview(bytearray(min(USUAL_STRIPE_BYTES, size - position)))
        reader.read_into(position, buffer)
        writer.append(buffer)


def download_file(namespace: Namespace, path: str, local_path: str, callback: Callback) -> None:
    """Copy a file of a namespace to this host, and create the folders above it.

    callback: an fsspec callback for the progress.
    """
    with namespace.open(path) as reader:
        size = reader.file.head.nbytes
        callback.set_size(size)
        os.makedirs(os.path.dirname(os.path.abspath(local_path)), exist_ok=True)
        with open(local_path, "wb") as target:
            buffer = memoryview(bytearray(min(size, USUAL_STRIPE_BYTES) or 1))
            for position in range(0, size, USUAL_STRIPE_BYTES):
                count = reader.read_into(position, buffer[: min(USUAL_STRIPE_BYTES, size - position)])
                target.write(buffer[:count])
                callback.relative_update(count)
