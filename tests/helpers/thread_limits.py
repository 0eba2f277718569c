"""A process that gets no more threads, as below the limit of a container (pids.max) or of a user (ulimit -u)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NO_THREAD = "can't start new thread"


class RefusedStarts:
    """The starts of threads of ckpt, of which some are refused."""

    def __init__(self, refused: range, name: str) -> None:
        self.names: list[str] = []
        """The names of the threads that were refused."""
        self._refused, self._name = refused, name
        self._count = 0
        self._lock = threading.Lock()
        self._start = threading.Thread.start

    def start(self, thread: threading.Thread) -> None:
        """Start a thread, unless this start is to be refused."""
        if thread.name.startswith(self._name):
            with self._lock:
                self._count += 1
                is_refused = self._count in self._refused
                if is_refused:
                    self.names.append(thread.name)
            if is_refused:
                raise RuntimeError(NO_THREAD)
        self._start(thread)


@contextmanager
def refused_threads(first: int, last: int | None = None, name: str = "ckpt-") -> Iterator[RefusedStarts]:
    """Refuse the `first` start of a thread in this process whose name begins with `name`, and all up to the `last`.

    last: None: the first one alone.
    """
    starts = RefusedStarts(range(first, (first if last is None else last) + 1), name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: starts.start(thread))
        yield starts
