"""Writers that take a repository over from each other, by the lease, the commit and the sweep of the product, in single steps.

Each operation of a store is a step, and so is the moment between the confirmation of a commit and its publication. These
promises are checked after each step:

* Each step of the repository has all of its files.
* A record is never replaced by one of an older writer.
* A step whose save was acknowledged exists as long as no newer writer has deleted it by its `keep`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from obstore.store import MemoryStore

from ckpt.errors import Fenced
from ckpt.format.json_records import CommitRecord, FileRecord, decode_commit
from ckpt.repository.commit_publication import publish_commit
from ckpt.repository.completeness import note_complete
from ckpt.repository.repository import Repository, commit_name
from ckpt.repository.retention import Keep, sweep
from ckpt.repository.writer_lease import AttemptSeries, acquire_lease
from ckpt.storage.base.errors import NotFound, StoreError
from ckpt.storage.base.store import Buffer, Entry, Store, Version
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.remote.object_store import ObjectStore
from helpers.interleaving import Interleaving

SERIES = AttemptSeries(None, 0, 0, 0)


class SteppedLocalStore(LocalStore):
    """A directory each of whose operations is a step."""

    def __init__(self, path: Path, step: Callable[[str], None]) -> None:
        super().__init__(path)
        self._step = step

    def put(self, name: str, data: Buffer) -> None:
        self._step(f"put {name}")
        super().put(name, data)

    def put_new(self, name: str, data: Buffer) -> None:
        self._step(f"put new {name}")
        super().put_new(name, data)

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        def confirm_and_wait() -> None:
            confirm()
            self._step(f"publish {name}, confirmed")

        self._step(f"prepare {name}")
        super().publish(name, data, confirm_and_wait, replaces)

    def _require_unchanged(self, name: str, expected: bytes) -> None:
        super()._require_unchanged(name, expected)
        self._step(f"replace {name}, unchanged")

    def get(self, name: str) -> bytes:
        self._step(f"get {name}")
        return super().get(name)

    def get_up_to(self, name: str, limit: int) -> bytes:
        self._step(f"get {name}")
        return super().get_up_to(name, limit)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self._step(f"list {prefix}")
        yield from list(super().list(prefix))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        self._step(f"list {prefix}")
        yield from list(super().list_folders(prefix))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._step(f"delete {name}")
            super().delete([name])

    def sweep_temporaries(self, prefix: str, *, folders: bool = True) -> None:
        self._step(f"sweep temporaries in {prefix}")
        super().sweep_temporaries(prefix, folders=folders)


class _SteppedClient:
    """The client of a bucket, each of whose requests is a step."""

    def __init__(self, inner: Any, step: Callable[[str], None]) -> None:
        self._inner, self._step = inner, step

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)

        def request(*arguments: Any, **options: Any) -> Any:
            self._step(f"{name} {arguments[0] if arguments else ''}")
            return call(*arguments, **options)

        return request


class SteppedBucket(ObjectStore):
    """A bucket in memory, each of whose requests is a step."""

    def __init__(self, url: str, memory: MemoryStore, step: Callable[[str], None]) -> None:
        self.url = url
        self._store = _SteppedClient(memory, step)  # type: ignore[assignment]


class Takeover:
    """One run of writers of one repository, one after another, of which the earlier ones may still run."""

    def __init__(self, kind: str, folder: Path, rng: random.Random, keep: Keep | None, kills: float = 0.0) -> None:
        self._rng, self._keep = rng, keep
        self.interleaving = Interleaving(rng, self._check, kills=kills)
        memory, url = MemoryStore(), f"memory://{folder.name}"
        self._open_store: Callable[[], Store] = (
            (lambda: SteppedLocalStore(folder, self.interleaving.step))
            if kind == "local"
            else (lambda: SteppedBucket(url, memory, self.interleaving.step))
        )
        self._seen = Repository(self._open_store())
        self._newest: dict[int, int] = {}
        """The highest generation that has published each step."""
        self._acknowledged: dict[int, str] = {}
        """The attempt of each acknowledged step that nobody may have deleted or replaced."""
        self.commits = 0
        self.fenced = 0

    def add_writer(self, name: str, count: int) -> None:
        """Add a writer that continues after the newest step that it finds, and saves `count` steps."""
        self.interleaving.add(name, lambda: self._write(count))

    def _write(self, count: int) -> None:
        repo = Repository(self._open_store())
        try:
            lease = acquire_lease(repo)
        except Fenced:
            self.fenced += 1
            return
        try:
            lease.sweep_temporaries_once()
            first = max(repo.step_numbers(), default=0) + 1
            for step in range(first, first + count):
                attempt = lease.begin_attempt(step, SERIES)
                commit = self._save(repo, step, attempt.name, lease.generation)
                publish_commit(repo, lease, commit, lambda _: None)
                self._acknowledge(step, attempt.name, lease.generation)
                lease.end_attempt(attempt)
                sweep(repo, lease, self._keep, [step])
        except (Fenced, StoreError) as error:
            shown = lease.explain_failure(error)
            if not isinstance(shown, Fenced):
                raise
            self.fenced += 1

    def _save(self, repo: Repository, step: int, attempt: str, generation: int) -> CommitRecord:
        """Write the files of an attempt, and return a record of it that also refers to the packs of the newest step before."""
        earlier = max((number for number in repo.step_numbers() if number < step), default=None)
        reused = () if earlier is None else self._packs(repo, earlier)
        names = [f"steps/{step}/pack/{attempt}.pack", f"steps/{step}/manifest/{attempt}.parquet"]
        for name in names:
            repo.store.put(name, attempt.encode())
        pack, manifest = (FileRecord(name, len(attempt)) for name in names)
        commit = CommitRecord(
            step, generation, "2026-01-01T00:00:00Z", 1, (manifest,), (), (pack, *reused[:1]), 0, 0, 0, 0, None, "0.1.0"
        )  # fmt: skip
        note_complete(commit)
        return commit

    def _packs(self, repo: Repository, step: int) -> tuple[FileRecord, ...]:
        try:
            return repo.record(step).packs
        except NotFound:
            return ()

    def _acknowledge(self, step: int, attempt: str, generation: int) -> None:
        self.commits += 1
        if generation >= self._newest.get(step, 0):
            self._acknowledged[step] = attempt

    def _check(self) -> None:
        store = self._seen.store
        sizes = {entry.name: entry.nbytes for entry in store.list("steps")}
        for step in {int(name.split("/")[1]) for name in sizes if name.endswith("/commit.json")}:
            try:
                commit = decode_commit(store.get(commit_name(step)), commit_name(step))
            except NotFound:  # a reservation
                continue
            for file in (*commit.manifests, *commit.packs):
                assert sizes.get(file.name) == file.nbytes, f"step {step} has lost {file.name}"
            newest = self._newest.get(step, 0)
            assert commit.generation >= newest, f"step {step} of writer {newest} was replaced by writer {commit.generation}"
            self._newest[step] = commit.generation
        for step, attempt in list(self._acknowledged.items()):
            if commit_name(step) not in sizes:
                later = sum(name.endswith("/commit.json") and int(name.split("/")[1]) > step for name in sizes)
                is_expired = self._keep is not None and later >= self._keep.last
                assert is_expired, f"step {step} of {attempt} was acknowledged, and is lost"
                del self._acknowledged[step]
