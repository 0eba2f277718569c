"""A call in a forked child of the test, which has copies of all objects."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable
from typing import Any


def in_forked_child(call: Callable[[], Any]) -> Any:
    """Call a function in a forked child, and return its result, which must be JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        gc.freeze()  # connections of the parent that are garbage abort the child when they are collected there
        try:
            os.write(writing, json.dumps(call()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the call failed in the child"
    return json.loads(text)
