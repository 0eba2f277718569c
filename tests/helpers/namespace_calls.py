"""Calls of a client of a namespace, and their results as `helpers.linearizability.Call` has them."""

from __future__ import annotations

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.base.errors import AlreadyExists, NotFound


def content(value: str, nbytes: int) -> bytes:
    """Return bytes that begin with a value and repeat it, so that a mixture of two files is noticed."""
    line = f"{value} {nbytes}\n".encode()
    return (line * (nbytes // len(line) + 1))[: max(nbytes, len(line))]


def value_of(data: bytes) -> str:
    """Return the value with which `content` made these bytes."""
    value, nbytes = data[: data.index(b"\n")].decode().split()
    assert data == content(value, int(nbytes)), f"the bytes of {value} are mixed with others"
    return value


def make_call(namespace: Namespace, kind: str, file: str, value: str, nbytes: int) -> str | None:
    """Make one call and return its result."""
    if kind == "get":
        try:
            return value_of(namespace.get(file))
        except NotFound:
            return None
    if kind == "delete":
        return None if namespace.delete([file]) else "missing"
    try:
        namespace.put(file, content(value, nbytes), new=kind == "put_new")
    except AlreadyExists:
        return "exists"
    return None
