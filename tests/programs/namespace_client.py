"""A client of a namespace that calls it at random and records each call.

    namespace_client.py NAME SEED COUNT LOG CLOCK_OFFSET CONFIGURATION

A call is a line in LOG before it begins, and another one when it has ended. Times are those of CLOCK_MONOTONIC, which all
processes of a host share. CLOCK_OFFSET: seconds by which the clock of this client is wrong.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

name, seed, count, log, offset, configuration = sys.argv[1:]
right_clock = time.time
time.time = lambda: right_clock() + float(offset)

from ckpt.aggregator.cluster.config import config_from_table  # noqa: E402
from ckpt.aggregator.file_io.namespace import Namespace  # noqa: E402
from ckpt.storage.base.errors import AlreadyExists, NotFound, StoreError  # noqa: E402

FILES = ("a", "b", "folder/c")
SIZES = (20, 200, 40_000, 300_000)
"""Bytes of a file: two are stored in the record, two as objects."""


def content(value: str, nbytes: int) -> bytes:
    """Return bytes that begin with a value and repeat it, so that a mixture of two files is noticed."""
    line = f"{value} {nbytes}\n".encode()
    return (line * (nbytes // len(line) + 1))[: max(nbytes, len(line))]


def value_of(data: bytes) -> str:
    """Return the value with which `content` made these bytes."""
    value, nbytes = data[: data.index(b"\n")].decode().split()
    assert data == content(value, int(nbytes)), f"the bytes of {value} are mixed with others"
    return value


def call(namespace: Namespace, kind: str, file: str, value: str, nbytes: int) -> str | None:
    """Make one call and return its result, as `helpers.linearizability.Call` has it."""
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


def main() -> None:
    draw = random.Random(seed)
    namespace = Namespace(config_from_table("test", json.loads(configuration), "the test"))
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(int(count)):
        kind = draw.choice(["put", "put", "put_new", "get", "get", "get", "delete"])
        file, value, nbytes = draw.choice(FILES), f"{name}.{number}", draw.choice(SIZES)
        began = {"number": number, "kind": kind, "file": file, "value": value, "began": time.monotonic()}
        os.write(out, f"{json.dumps(began)}\n".encode())
        try:
            ended = {"result": call(namespace, kind, file, value, nbytes), "ended": time.monotonic()}
        except StoreError as error:  # the call may take place later, or never
            ended = {"error": f"{type(error).__name__}: {error}"}
        os.write(out, f"{json.dumps({'number': number} | ended)}\n".encode())
        time.sleep(draw.random() * 0.02)
    namespace.close()


main()
