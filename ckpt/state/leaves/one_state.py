"""What the leaves of one state share while they are made, such as an event on a stream of an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    """An object that leaves share."""

    def close(self) -> Any:
        """Called when all leaves of the state are made, in the thread that made them."""


C = TypeVar("C", bound=Closable)


class _ThreadLocal(threading.local):
    shared: dict[Hashable, Closable] | None = None


_local = _ThreadLocal()


@contextmanager
def one_state() -> Iterator[None]:
    """Leaves that this thread makes within belong to one state."""
    outer, _local.shared = _local.shared, {}
    try:
        yield
        for found in _local.shared.values():
            found.close()
    finally:
        _local.shared = outer


def shared(key: Hashable, make: Callable[[], C]) -> C:
    """Return the object with this key that the leaves of a state share. Outside of `one_state`, each leaf has its own."""
    if _local.shared is None:
        return make()
    found = _local.shared.get(key)
    if found is None:
        found = _local.shared[key] = make()
    return found  # type: ignore[return-value]
