"""Stores and fail points that fail on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.base.store import Entry, Reader, Store, Writer


@contextmanager
def failing(spec: str) -> Iterator[None]:
    """Set fail points of this process, and clear them at the end."""
    set_failpoints(spec)
    try:
        yield
    finally:
        set_failpoints("")


class Injected(StoreError):
    """The failure that a FailingStore injects."""


class FailingStore(Store):
    """Passes all calls on to another store; the `at`-th call of `method` fails, before or after it took effect.

    Calls of writers and readers count as "append", "commit", "read_into". The URL is that of the inner store.
    """

    def __init__(self, inner: Store, method: str = "", at: int = 0, after: bool = False) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls: dict[str, int] = {}
        self.failed = False
        self._method = method
        self._at = at
        self._after = after

    def call(self, name: str, work: Any) -> Any:
        """Count one call and do it, or raise the injected failure."""
        count = self.calls[name] = self.calls.get(name, 0) + 1
        is_failing = name == self._method and count == self._at
        if is_failing and not self._after:
            self.failed = True
            raise Injected(f"injected: call {count} of {name} on {self.url}")
        result = work()
        if is_failing:
            self.failed = True
            raise Injected(f"injected: answer {count} of {name} on {self.url} got lost")
        return result

    def put(self, name: str, data: Any) -> None:
        self.call("put", lambda: self.inner.put(name, data))

    def put_new(self, name: str, data: Any) -> None:
        self.call("put_new", lambda: self.inner.put_new(name, data))

    def get(self, name: str) -> bytes:
        return self.call("get", lambda: self.inner.get(name))  # type: ignore[no-any-return]

    def open(self, name: str) -> Reader:
        return _FailingReader(self, self.call("open", lambda: self.inner.open(name)))

    def create(self, name: str, size_hint: int = 0) -> Writer:
        return _FailingWriter(self, self.call("create", lambda: self.inner.create(name, size_hint)))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return iter(self.call("list", lambda: [*self.inner.list(prefix)]))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        return iter(self.call("list_folders", lambda: [*self.inner.list_folders(prefix)]))

    def delete(self, names: Any) -> None:
        names = [*names]
        self.call("delete", lambda: self.inner.delete(names))

    def exists(self, name: str) -> bool:
        return self.call("exists", lambda: self.inner.exists(name))  # type: ignore[no-any-return]

    def sweep_temporaries(self, prefix: str, *, folders: bool = True) -> None:
        self.call("sweep_temporaries", lambda: self.inner.sweep_temporaries(prefix, folders=folders))


class _FailingWriter(Writer):
    def __init__(self, store: FailingStore, inner: Writer) -> None:
        self._store, self._inner = store, inner

    def append(self, data: memoryview) -> int:
        return self._store.call("append", lambda: self._inner.append(data))  # type: ignore[no-any-return]

    def commit(self) -> int:
        return self._store.call("commit", self._inner.commit)  # type: ignore[no-any-return]

    def abort(self) -> None:
        self._inner.abort()


class _FailingReader(Reader):
    def __init__(self, store: FailingStore, inner: Reader) -> None:
        self._store, self._inner = store, inner

    def read_into(self, position: int, buffer: memoryview) -> int:
        return self._store.call("read_into", lambda: self._inner.read_into(position, buffer))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._inner.close()
