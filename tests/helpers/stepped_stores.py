"""Stores each of whose operations is a step; the reply of a write may be lost or late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.store import Buffer, Entry, Version
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.remote.object_store import ObjectStore
from helpers.interleaving import Fate, Steps

_READS = ("get", "head", "list")
"""The beginnings of the steps that change no object."""


def is_read(step: str) -> bool:
    """Return whether a step of one of these stores changes no object. step: an entry of `Interleaving.steps`."""
    return step.partition(": ")[2].startswith(_READS)


class SteppedLocalStore(LocalStore):
    """A directory each of whose operations is a step. A call whose reply is late continues in a thread, as on a hung mount."""

    def __init__(self, path: Path, steps: Steps) -> None:
        super().__init__(path, direct=False)
        self._steps = steps

    def put(self, name: str, data: Buffer) -> None:
        self._write(f"put {name}", lambda: super(SteppedLocalStore, self).put(name, data))

    def put_new(self, name: str, data: Buffer) -> None:
        self._write(f"put new {name}", lambda: super(SteppedLocalStore, self).put_new(name, data))

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        def confirm_and_wait() -> None:
            confirm()
            self._steps.step(f"publish {name}, confirmed")

        publish = super().publish
        self._write(f"prepare {name}", lambda: publish(name, data, confirm_and_wait, replaces))

    def _require_unchanged(self, name: str, expected: bytes) -> None:
        super()._require_unchanged(name, expected)
        self._steps.step(f"replace {name}, unchanged")

    def get(self, name: str) -> bytes:
        self._steps.step(f"get {name}")
        return super().get(name)

    def get_up_to(self, name: str, limit: int) -> bytes:
        self._steps.step(f"get {name}")
        return super().get_up_to(name, limit)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self._steps.step(f"list {prefix}")
        yield from list(super().list(prefix))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        self._steps.step(f"list {prefix}")
        yield from list(super().list_folders(prefix))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._write(f"delete {name}", lambda name=name: super(SteppedLocalStore, self).delete([name]))  # type: ignore[misc]

    def sweep_temporaries(self, prefix: str, *, folders: bool = True) -> None:
        self._steps.step(f"sweep temporaries in {prefix}")
        super().sweep_temporaries(prefix, folders=folders)

    def _write(self, what: str, call: Callable[[], None]) -> None:
        fate = self._steps.step(what, can_fail=True)
        if fate is Fate.LATE:
            self._steps.call_later(what, call)
            self._steps.step(f"time out: {what}")  # the call may have begun before
        else:
            call()
        if fate is not Fate.DONE:
            raise StoreError(f"{what}: no answer")


class _SteppedClient:
    """The client of a bucket, each of whose requests is a step."""

    def __init__(self, inner: Any, steps: Steps) -> None:
        self._inner, self._steps = inner, steps

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)

        def request(*arguments: Any, **options: Any) -> Any:
            what = f"{name} {arguments[0] if arguments else ''}"
            fate = self._steps.step(what, can_fail=name in ("put", "delete"))
            if fate is Fate.DONE:
                return call(*arguments, **options)
            if fate is Fate.LATE:
                arguments = tuple(bytes(each) if isinstance(each, memoryview) else each for each in arguments)
                self._steps.call_later(what, lambda: call(*arguments, **options))
            else:
                call(*arguments, **options)
            raise GenericError(f"{what}: no answer")

        return request


class PlainBucket(ObjectStore):
    """A bucket in memory."""

    def __init__(self, url: str, memory: MemoryStore) -> None:
        self.url = url
        self._store = memory


class SteppedBucket(ObjectStore):
    """A bucket in memory, each of whose requests is a step."""

    def __init__(self, url: str, memory: MemoryStore, steps: Steps) -> None:
        self.url = url
        self._store = _SteppedClient(memory, steps)  # type: ignore[assignment]
