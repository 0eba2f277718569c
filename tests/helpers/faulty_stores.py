"""Folders each of whose operations is a step, and whose files can't be read, or are damaged, for a number of steps."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from obstore import store as objects

from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.base.store import Entry, Reader, Store, Writer
from ckpt.storage.local.shared_memory import MemoryStore
from helpers.interleaving import Fate, Interleaving, Steps
from helpers.stepped_stores import SteppedBucket, SteppedLocalStore

_NAMES = ("tier.json", "commit.json", "generations/", "commit.json", "tier.json", "ckpt.json", "/manifest/", ".pack")


@dataclass(frozen=True)
class Fault:
    """What fails from one step of a run to another one: a whole store, or some files of it."""

    begin: int
    end: int
    kind: str
    """memory or run: the store."""
    names: str
    """A part of the names of the files that fail; "" for the whole store, which gives no answer."""
    effect: Literal["no answer", "damage", "bad sector"]
    """Whether the files can't be read now, are read with a changed byte, or are on sectors that the device can't read."""

    @property
    def is_damage(self) -> bool:
        """Whether a reader must take the file for damaged."""
        return self.effect != "no answer"


class Faults:
    """The faults of one run."""

    def __init__(self, interleaving: Interleaving, seed: int) -> None:
        self._faults: list[Fault] = []
        self._interleaving = interleaving
        self._draw = random.Random(f"effects of {seed}")

    def begin(self, draw: random.Random, begin: int | None = None) -> None:
        """Add a fault that a seed decides. begin: the step of the run at which it begins; by default this one."""
        names = "" if draw.random() < 0.25 else draw.choice(_NAMES)
        is_damage = self._draw.random() < 0.5
        if names.endswith((".json", "/")) and names != "/manifest/":
            is_damage = draw.random() < 0.5
        effect: Any = self._draw.choice(["damage", "bad sector"]) if names and is_damage else "no answer"
        begin = len(self._interleaving.steps) if begin is None else begin
        end = begin + draw.choice([10, 50, 200, 1_000])
        self._faults.append(Fault(begin, end, draw.choice(["memory", "memory", "run"]), names, effect))

    def __str__(self) -> str:
        return "; ".join(map(str, self._faults))

    def were_active_since(self, step: int) -> bool:
        """Return whether anything failed after a step of the run."""
        return any(fault.begin <= len(self._interleaving.steps) and fault.end > step for fault in self._faults)

    def is_damaged_since(self, kind: str, name: str, step: int) -> bool:
        """Return whether reads of a file have met a changed byte or a bad sector since a step of the run, and do so now."""
        return any(fault.is_damage and fault.begin <= step for fault in self._active(kind, name))

    def was_damaged(self, kind: str, name: str) -> bool:
        """Return whether reads of a file have met a changed byte or a bad sector at any step so far."""
        now = len(self._interleaving.steps)
        return any(f.kind == kind and f.is_damage and f.begin <= now and f.names in name for f in self._faults)

    def _active(self, kind: str, what: str) -> Iterator[Fault]:
        now = len(self._interleaving.steps)
        return (f for f in self._faults if f.kind == kind and f.begin <= now < f.end and f.names in what)

    def raise_if_failing(self, kind: str, what: str) -> None:
        """Raise Unavailable or StoreError if a call of a store fails now. what: the step."""
        for fault in self._active(kind, what):
            if not fault.names:
                raise Unavailable(f"{what}: {kind} does not answer")
            if what.startswith("get") and fault.effect == "no answer":
                raise StoreError(f"{what}: permission denied")
            if what.startswith("get") and fault.effect == "bad sector":
                raise StoreError(f"{what}: input/output error") from OSError(errno.EIO, os.strerror(errno.EIO))

    def read(self, kind: str, name: str, data: bytes) -> bytes:
        """Return what a read of a file returns now. data: its content."""
        return bytes([data[0] ^ 1]) + data[1:] if data and self.changes(kind, name) else data

    def changes(self, kind: str, name: str) -> bool:
        """Return whether reads of a file return a changed byte now."""
        return any(fault.effect == "damage" for fault in self._active(kind, name))


class _FailingSteps(Steps):
    """The steps of one store. Some raise an error of the store."""

    def __init__(self, kind: str, faults: Faults, interleaving: Interleaving) -> None:
        self._kind, self._faults, self._interleaving = kind, faults, interleaving

    def step(self, what: str, *, can_fail: bool = False) -> Fate:
        fate = self._interleaving.step(f"{what} in {self._kind}", can_fail=can_fail)
        self._faults.raise_if_failing(self._kind, what)
        return fate

    def call_later(self, what: str, call: Callable[[], object]) -> None:
        self._interleaving.call_later(f"{what} in {self._kind}", call)


class FaultyFolder(SteppedLocalStore):
    """The folder of a repository of record. Also each pack that is written or opened is a step."""

    kind = "run"

    def __init__(self, path: Path, faults: Faults, interleaving: Interleaving) -> None:
        super().__init__(path, _FailingSteps(self.kind, faults, interleaving))
        self._faults = faults

    def get(self, name: str) -> bytes:
        return self._faults.read(self.kind, name, super().get(name))

    def get_up_to(self, name: str, limit: int) -> bytes:
        return self._faults.read(self.kind, name, super().get_up_to(name, limit))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        yield from sorted(super().list(prefix), key=lambda entry: entry.name)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        yield from sorted(super().list_folders(prefix))

    def open(self, name: str) -> Reader:
        self._steps.step(f"get {name}")
        return self._stepped(name, super().open(name))

    def open_once(self, name: str) -> Reader:
        self._steps.step(f"get {name}")
        return self._stepped(name, super().open_once(name))

    def _stepped(self, name: str, reader: Reader) -> Reader:
        return _SteppedReader(reader, lambda: self._steps.step(f"get {name}"), lambda: self._faults.changes(self.kind, name))

    def answers(self, seconds: float) -> bool:
        self._steps.step("get answer")
        return super().answers(seconds)

    def create(self, name: str, size_hint: int = 0) -> Any:
        self._steps.step(f"create {name}")
        return _SteppedWriter(super().create(name, size_hint), lambda call: self._write(f"put {name}", call))

    def revoke(self, name: str) -> bool:
        self._steps.step(f"revoke {name}")
        return super().revoke(name)


class FaultyMemory(FaultyFolder, MemoryStore):
    """A memory tier."""

    kind = "memory"

    def __init__(self, path: Path, faults: Faults, interleaving: Interleaving) -> None:
        MemoryStore.__init__(self, path)
        self._steps, self._faults = _FailingSteps(self.kind, faults, interleaving), faults

    def sweep_temporaries(self, prefix: str, *, folders: bool = True) -> None:
        self._steps.step(f"sweep temporaries in {prefix}")
        MemoryStore.sweep_temporaries(self, prefix, folders=folders)


class FaultyBucket(SteppedBucket):
    """The bucket of a repository of record."""

    def __init__(self, url: str, memory: objects.MemoryStore, faults: Faults, interleaving: Interleaving) -> None:
        super().__init__(url, memory, _FailingSteps("run", faults, interleaving))
        self._faults = faults

    def get(self, name: str) -> bytes:
        return self._faults.read("run", name, super().get(name))

    def get_up_to(self, name: str, limit: int) -> bytes:
        return self._faults.read("run", name, super().get_up_to(name, limit))


class _SteppedReader(Reader):
    def __init__(self, inner: Reader, step: Callable[[], object], is_changed: Callable[[], bool]) -> None:
        self._inner, self._step, self._is_changed = inner, step, is_changed

    def read_into(self, position: int, buffer: memoryview) -> int:
        self._step()
        count = self._inner.read_into(position, buffer)
        if count and self._is_changed():
            buffer[0] ^= 1
        return count

    def close(self) -> None:
        self._inner.close()


class _SteppedWriter(Writer):
    def __init__(self, inner: Any, write: Callable[[Callable[[], None]], None]) -> None:
        self._inner, self._write, self._length = inner, write, 0

    def append(self, data: memoryview) -> int:
        return self._inner.append(data)  # type: ignore[no-any-return]

    def commit(self) -> int:
        lengths: list[int] = []
        self._write(lambda: lengths.append(self._inner.commit()))
        return lengths[0]

    def abort(self) -> None:
        self._inner.abort()


def open_faulty(path: Path, faults: Faults, interleaving: Interleaving) -> Store:
    """Return the store of a memory tier, if a folder above it is called memory, or else of a repository of record."""
    return (FaultyMemory if "memory" in path.parts else FaultyFolder)(path, faults, interleaving)
