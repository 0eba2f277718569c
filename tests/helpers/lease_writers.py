"""Lease records of other writers, and stores whose operations a test can precede with what another writer does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from ckpt.format import json_records
from ckpt.groups.process_identity import ProcessIdentity, process_start_ticks, this_process
from ckpt.repository.lease_records import generation_name
from ckpt.repository.repository import Repository
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore
from helpers.folders import fast_folder
from helpers.interleaving import Fate, Steps
from helpers.stepped_stores import SteppedBucket, SteppedLocalStore


def elsewhere() -> ProcessIdentity:
    """Return a process of another host, of which nobody can see whether it lives."""
    return dataclasses.replace(this_process(), host="elsewhere", boot="b", pid=4711)


def dead() -> ProcessIdentity:
    """Return a process of this host that has ended."""
    return dataclasses.replace(this_process(), pid=1 << 30)


def living() -> ProcessIdentity:
    """Return another process of this host that lives."""
    return dataclasses.replace(this_process(), pid=os.getppid(), started=process_start_ticks(os.getppid()))


def put_lease_record(store: Store, generation: int, owner: ProcessIdentity | None = None) -> None:
    """Write the record of a generation, as another writer would. owner: its holder; None: it was released."""
    body = {"owner": None if owner is None else dataclasses.asdict(owner)}
    store.put(generation_name(generation), json_records.encode("generation", body))


class Events(Steps):
    """What happens right before operations of a store, whose names `SteppedLocalStore` and `SteppedBucket` define."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        """The operations so far."""
        self._events: list[tuple[str, Callable[[], object], bool]] = []
        self._is_running = False

    def before(self, operation: str, event: Callable[[], object], *, each_time: bool = False) -> None:
        """Call `event` before the next operation whose name begins with `operation`. each_time: before each such one."""
        self._events.append((operation, event, each_time))

    def step(self, what: str, *, can_fail: bool = False) -> Fate:
        """Record an operation, and run the event before it. Operations of an event cause none."""
        if self._is_running:
            return Fate.DONE
        self.seen.append(what)
        due = [each for each in self._events if what.startswith(each[0])]
        self._events = [each for each in self._events if each not in due or each[2]]
        self._is_running = True
        try:
            for _, event, _ in due:
                event()
        finally:
            self._is_running = False
        return Fate.DONE


def eventful_store(kind: str, folder: Path, events: Events) -> Store:
    """Return a local directory or a bucket, whose operations `events` precedes."""
    if kind == "local":
        return SteppedLocalStore(folder, events)
    return SteppedBucket(f"memory://{folder.name}", MemoryStore(), events)


@pytest.fixture
def events() -> Events:
    """Return what happens before operations of the store. A test module imports this fixture, and those that it uses."""
    return Events()


@pytest.fixture(name="repo", params=["local", "bucket"])
def eventful_repo(request: pytest.FixtureRequest, tmp_path: Path, events: Events) -> Iterator[Repository]:
    """Yield a repository that nobody has written. `events` precedes the operations of its store."""
    with fast_folder(tmp_path) as folder:
        yield Repository(eventful_store(request.param, folder / "run", events))


@pytest.fixture(name="repo")
def local_repo(tmp_path: Path) -> Iterator[Repository]:
    """Yield a repository in a local directory that nobody has written."""
    with fast_folder(tmp_path) as folder:
        yield Repository(LocalStore(folder / "run"))
