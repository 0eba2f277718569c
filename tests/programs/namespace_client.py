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

from helpers.namespace_calls import make_call  # noqa: E402

from ckpt.aggregator.cluster.config import config_from_table  # noqa: E402
from ckpt.aggregator.file_io.namespace import Namespace  # noqa: E402
from ckpt.storage.base.errors import StoreError  # noqa: E402

FILES = ("a", "b", "folder/c")
SIZES = (20, 200, 40_000, 300_000)
"""Bytes of a file: two are stored in the record, two as objects."""


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
            ended = {"result": make_call(namespace, kind, file, value, nbytes), "ended": time.monotonic()}
        except StoreError as error:  # the call may take place later, or never
            ended = {"error": f"{type(error).__name__}: {error}"}
        os.write(out, f"{json.dumps({'number': number} | ended)}\n".encode())
        time.sleep(draw.random() * 0.02)
    namespace.close()


main()
