"""Writers that take a repository over from each other, by the lease, the commit and the sweep of the product, in single steps.

Each operation of a store is a step, and so is the moment between the confirmation of a commit and its publication. A file may
be damaged, unreadable or on a bad sector for a while, and the store may give no answer. These promises of the documentation are
checked after each step:

* Each step of the repository has all of its files: nothing is swept that a committed step needs.
* A record is never replaced by one of an older writer.
* A writer that was replaced before a publication began never commits.
* Once a newer writer has swept the repository, no new step of an older writer appears.
* Of each window of `Keep(every=)`, a step stays.
* A step whose save was acknowledged exists as long as no newer writer has deleted it by its `keep`. The exception is in the
  documentation: an older writer deletes a step of the same number, and is stopped, or its request, between the check of its
  lease and the deletion.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from obstore.store import MemoryStore

from ckpt.errors import Fenced
from ckpt.format.json_records import CommitRecord, StepFile, decode_commit
from ckpt.repository.attempt import Attempt, AttemptSeries
from ckpt.repository.commit_publication import delete_files, publish_commit, settle_attempt
from ckpt.repository.completeness import note_complete
from ckpt.repository.file_names import commit_name
from ckpt.repository.lease_records import newest_generation
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep, sweep
from ckpt.repository.writer_lease import WriterLease, acquire_lease
from ckpt.storage.base.errors import CkptError, IntegrityError, NotFound, StoreError
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore
from helpers.faulty_stores import Faults, FaultyBucket, FaultyFolder
from helpers.interleaving import Interleaving, Scheduler
from helpers.stepped_stores import PlainBucket, is_read

SERIES = AttemptSeries(None, 0, 0, 0)


class Takeover:
    """One run of writers of one repository, one after another, of which the earlier ones may still run."""

    def __init__(self, kind: str, folder: Path, scheduler: Scheduler, keep: Keep | None, seed: int = 0) -> None:
        self._keep = keep
        self.interleaving = Interleaving(scheduler, self._check)
        self.faults = Faults(self.interleaving, seed)
        memory, url = MemoryStore(), f"memory://{folder.name}"
        self._open_store: Callable[[], Store] = (
            (lambda: FaultyFolder(folder, self.faults, self.interleaving))
            if kind == "local"
            else (lambda: FaultyBucket(url, memory, self.faults, self.interleaving))
        )
        self._seen = Repository(LocalStore(folder, direct=False) if kind == "local" else PlainBucket(url, memory))
        """The repository without steps and faults."""
        self._seen.ensure()
        self._newest: dict[int, int] = {}
        """The highest generation that has published each step."""
        self._acknowledged: dict[int, str] = {}
        """The attempt of each acknowledged step that nobody may have deleted or replaced."""
        self._begun_too_late: set[str] = set()
        """The attempts whose publication began after a newer writer had taken over."""
        self._generations: dict[str, int] = {}
        """The generation of each writer."""
        self._swept_generation = 0
        self.commits = 0
        self.fenced = 0
        self.failed = 0

    def add_writer(self, name: str, steps: int | tuple[int, ...]) -> None:
        """Add a writer. steps: the steps that it saves, or how many after the newest one that it finds."""
        self.interleaving.add(name, lambda: self.write(steps, name))

    def write(self, steps: int | tuple[int, ...], name: str = "") -> None:
        """Take the lease and save steps, as one writer. A save that fails is discarded, and the next step follows."""
        repo = Repository(self._open_store())
        try:
            lease = acquire_lease(repo)
        except Fenced:
            self.fenced += 1
            return
        except CkptError as error:
            self._require_explained(error)
            return
        self._generations[name] = lease.generation
        try:
            lease.sweep_temporaries_once()
            if isinstance(steps, int):
                newest = max(repo.step_numbers(), default=0)
                steps = tuple(range(newest + 1, newest + 1 + steps))
            for step in steps:
                self._try_step(repo, lease, step)
        except CkptError as error:
            shown = lease.explain_failure(error)
            if not isinstance(shown, Fenced) and not self.faults.were_active_since(0):
                raise
            self.fenced += isinstance(shown, Fenced)

    def _try_step(self, repo: Repository, lease: WriterLease, step: int) -> None:
        attempt = lease.begin_attempt(step, SERIES)
        replaced: set[str] = set()

        def note_replaced(existing: CommitRecord | None) -> None:
            replaced.update(() if existing is None else existing.files())

        try:
            commit = self._save(repo, step, attempt.name, lease.generation)
            if newest_generation(self._seen) > lease.generation:
                self._begun_too_late.add(attempt.name)
            publish_commit(repo, lease, commit, note_replaced)
        except CkptError as error:
            self._require_explained(error)
            _discard(repo, lease, attempt)
            lease.end_attempt(attempt)
            if isinstance(shown := lease.explain_failure(error), Fenced):
                raise shown from error
            self.failed += 1
            return
        self._acknowledge(step, attempt.name, lease.generation)
        lease.end_attempt(attempt)
        try:
            sweep(repo, lease, self._keep, [step], replaced_files=replaced)
        except CkptError as error:
            self._require_explained(error)
            if isinstance(error, Fenced):
                raise
        else:
            self._swept_generation = max(self._swept_generation, lease.generation)

    def _save(self, repo: Repository, step: int, attempt: str, generation: int) -> CommitRecord:
        """Write the files of an attempt, and return a record of it that also refers to the packs of the newest step before."""
        earlier = max((number for number in repo.step_numbers() if number < step), default=None)
        reused = () if earlier is None else self._packs(repo, earlier)
        names = [f"steps/{step}/pack/{attempt}.pack", f"steps/{step}/manifest/{attempt}.parquet"]
        for name in names:
            repo.store.put(name, attempt.encode())
        pack, manifest = (StepFile(name, len(attempt)) for name in names)
        commit = CommitRecord(
            step, generation, "2026-01-01T00:00:00Z", 1, (manifest,), (), (pack, *reused[:1]), 0, 0, 0, 0, None, "0.1.0"
        )  # fmt: skip
        note_complete(commit)
        return commit

    def _packs(self, repo: Repository, step: int) -> tuple[StepFile, ...]:
        try:
            return repo.record(step).packs
        except NotFound:
            return ()
        except IntegrityError as error:
            self._require_explained(error)
            return ()

    def _require_explained(self, error: CkptError) -> None:
        """Raise an error that the store can't explain, unless something was damaged: only then may a writer meet it."""
        if not isinstance(error, Fenced | StoreError) and not self.faults.were_active_since(0):
            raise error

    def _acknowledge(self, step: int, attempt: str, generation: int) -> None:
        self.commits += 1
        if generation >= self._newest.get(step, 0):
            self._acknowledged[step] = attempt

    def _check(self) -> None:
        if not self.interleaving.steps or not is_read(self.interleaving.steps[-1]):
            self.check()

    def check(self) -> None:
        """Raise AssertionError if a promise is broken now."""
        store = self._seen.store
        sizes = {entry.name: entry.nbytes for entry in store.list("steps")}
        for step in {int(name.split("/")[1]) for name in sizes if name.endswith("/commit.json")}:
            try:
                commit = decode_commit(store.get(commit_name(step)), commit_name(step))
            except NotFound:  # a reservation
                continue
            for file in (*commit.manifests, *commit.packs):
                assert sizes.get(file.name) == file.nbytes, f"step {step} has lost {file.name}"
            attempt = commit.manifests[0].name.rpartition("/")[2].removesuffix(".parquet")
            assert attempt not in self._begun_too_late, f"step {step} was committed by {attempt}, which was replaced before"
            newest = self._newest.get(step, 0)
            assert commit.generation >= newest, f"step {step} of writer {newest} was replaced by writer {commit.generation}"
            if not newest:
                swept = self._swept_generation
                assert commit.generation >= swept, (
                    f"step {step} of writer {commit.generation} was new after writer {swept} swept"
                )
            self._newest[step] = commit.generation
        for step, attempt in list(self._acknowledged.items()):
            if commit_name(step) not in sizes:
                later = sum(name.endswith("/commit.json") and int(name.split("/")[1]) > step for name in sizes)
                is_expired = self._keep is not None and later >= self._keep.last
                assert is_expired, f"step {step} of {attempt} was acknowledged, and is lost"
                if self._keep is not None and self._keep.every is not None:
                    steps = {int(name.split("/")[1]) for name in sizes if name.endswith("/commit.json")}
                    is_kept = steps & _kept_instead(step, self._keep.every)
                    assert is_kept, f"step {step} of {attempt} was the first of its window, and is lost"
                is_right = self._is_deleted_by(self._newest[step])
                assert is_right, f"step {step} of {attempt} was deleted by an older writer, and is lost"
                del self._acknowledged[step]

    def _is_deleted_by(self, generation: int) -> bool:
        """Return whether a writer of at least this generation made the last step.

        Also true for an older writer that was replaced right after the check of its lease, or whose request was late: no store
        has a conditional delete.
        """
        writer = self.interleaving.steps[-1].partition(":")[0]
        if writer not in self._generations:
            return True
        steps = [step for step in self.interleaving.steps if step.startswith(f"{writer}:")]
        *_, before, last, _ = [step.partition(": ")[2].removesuffix(" in run") for step in steps]
        has_checked = before == "list generations" and last.startswith("get generations/")
        return self._generations[writer] >= generation or has_checked


def _kept_instead(step: int, every: int) -> set[int]:
    """Return the steps of which one exists if a step has expired: the earlier ones of its window, or the multiple after it."""
    if step % every == 0:
        return set()
    neighbours = {step + 1} if (step + 1) % every == 0 else set[int]()
    return neighbours | {*range(step - step % every - 1, step)}


def _discard(repo: Repository, lease: WriterLease, attempt: Attempt) -> None:
    """Do what `Committer.discard` does."""
    with suppress(CkptError):
        if not settle_attempt(repo, lease, attempt):
            delete_files(repo, lease, attempt)
