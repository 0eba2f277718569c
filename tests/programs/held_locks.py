"""Saves and loads in a forked child, while a thread of the parent holds all locks that the modules of ckpt can reach.

Usage:

    held_locks.py FOLDER

The thread does not exist in the child.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from helpers.forked_child import in_forked_child

import ckpt
import ckpt.storage.remote.fsspec_store
from ckpt.aggregator.file_io import namespace
from ckpt.aggregator.placement import erasure
from ckpt.storage.base.failpoints import set_failpoints

LOCKS = type(threading.Lock()), type(threading.RLock()), threading.Condition
DEPTH = 6


def save_and_load(folder: str) -> None:
    values: dict[str, Any] = {"a": np.arange(300_000), "b": np.float32(np.nan)}
    for step in range(3):
        ckpt.save(values, folder, step=step, codec="auto")
        values["a"] = values["a"] + 1
    assert ckpt.load(folder)["a"][0] == 2


def save_and_load_in_child(folder: str) -> None:
    faulthandler.dump_traceback_later(300, exit=True)
    set_failpoints("save.stage=error@1000")
    save_and_load(folder)
    save_and_load("memory://child")
    namespace.open_namespace("ckpt://127.0.0.1:1,127.0.0.1:2/x")
    erasure.erasure_code(2, 1)


def parts(value: Any) -> list[Any]:
    """Return the items of a container, or the attributes of an object of ckpt."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values()) if type(value).__module__.startswith("ckpt.") else []


def find_locks(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, LOCKS):
        yield value
    elif depth < DEPTH:
        for part in parts(value):
            yield from find_locks(part, depth + 1)


def locks_of_ckpt() -> list[Any]:
    """Return the locks that the modules of ckpt can reach, each once."""
    modules = [dict(vars(module)) for name, module in list(sys.modules.items()) if name.startswith("ckpt.")]
    return list({id(lock): lock for names in modules for lock in find_locks(names)}.values())


def main() -> None:
    url = sys.argv[1]
    save_and_load(f"{url}/parent")
    locks = locks_of_ckpt()
    assert len(locks) > 15, len(locks)
    are_held, end = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            assert lock.acquire(timeout=300)
        are_held.set()
        end.wait()
        for lock in locks:
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    assert are_held.wait(600)
    try:
        in_forked_child(lambda: save_and_load_in_child(f"{url}/child"))
    finally:
        end.set()
        holder.join()


if __name__ == "__main__":
    main()
