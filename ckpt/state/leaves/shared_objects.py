"""Objects that the leaves of one state share while they are made, such as an event on a stream of an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar


class SharedObject(Protocol):
    """An object that the leaves of a state share."""

    def leaves_are_made(self) -> object:
        """Do what has to follow the last leaf of the state.

        `leaves_of_one_state` calls it once all leaves are made, in the thread that made them, and not after an error.
        """


T = TypeVar("T", bound=SharedObject)


class _ThreadLocal(threading.local):
    objects: dict[Hashable, SharedObject] | None = None


_local = _ThreadLocal()


@contextmanager
def leaves_of_one_state() -> Iterator[None]:
    """Let the leaves that this thread makes inside of the block share their objects."""
    outer, _local.objects = _local.objects, {}
    try:
        yield
        for found in _local.objects.values():
            found.leaves_are_made()
    finally:
        _local.objects = outer


def shared_object(key: Hashable, make: Callable[[], T]) -> T:
    """Return the object with this key. Outside of `leaves_of_one_state`, each call makes a new one."""
    if _local.objects is None:
        return make()
    found = _local.objects.get(key)
    if found is None:
        found = _local.objects[key] = make()
    return found  # type: ignore[return-value]
