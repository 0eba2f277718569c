"""Jobs with a memory tier, one after another, and the copies of their memory by `ckpt-run`, in single steps that a seed orders.

Each operation of a store is a step. The code of the product runs: `TierManager` with its copier, whose thread is an actor, the
fallback of a load, and `drain`. Only the threads of a save are replaced: one actor writes its packs, and the `Committer` of the
product does the rest. A store may give no answer for a while, and a file may be damaged, unreadable or on a bad sector for a
while. The repository of record is a folder or a bucket.

These promises are checked after each step:

* Each committed step of a tier has all of its files there. A file of a memory that was read as damaged may be removed if
  another tier has it.
* No tier gets an older save of a step in place of a later one whose record is undamaged, and no writer commits that was
  replaced before it began.
* The newest acknowledged step, or a later save, is in a tier: until the next job continues from an older step, with a warning.
* A step that is deleted from a tier has enough newer ones there, by the `keep` of the tier, or one in the repository of record.
* A step in memory that is due in the repository of record stays until that has it, and a clean end deletes it only if its
  record can be read there.
* After `wait` and a clean end, the repository of record has the newest step that is due there, or a later save. The exception
  is an earlier job that still ran, and may delete a step from its own memory.
* The same holds after a drain whose report does not say that a memory was not drained: `ckpt-run` then deletes the memory.
* A job restores the newest acknowledged step. It restores an older one only after a warning, if a store or a record failed.
"""

from __future__ import annotations

import logging
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ckpt.format.json_records import CommitRecord, StepFile, decode_commit
from ckpt.groups.base import SingleProcessGroup
from ckpt.loading.newest_step_load import load_newest_on_all_ranks
from ckpt.loading.rank_agreement import LoadRequest
from ckpt.repository import commit_publication, file_names, lease_records, repository
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease
from ckpt.saving.options import Options
from ckpt.storage.base.errors import CkptError, NotFound
from ckpt.tiers import manager, memory_drain, previous_memory, tier_spec
from ckpt.tiers.manager import TierManager
from ckpt.tiers.tier_spec import Tier
from helpers.faulty_stores import Faults
from helpers.interleaving import Interleaving, current_actor_name
from helpers.simulated_places import Places
from helpers.single_thread_saves import load_checkpoint, save, state_of_save
from helpers.stepped_processes import PerProcess, ProcessScheduler, process_of, separate_processes
from helpers.stepped_stores import is_read

_publish_commit = commit_publication.publish_commit

EVERY = 2
"""Step N is due in the repository of record if N + 1 is a multiple of this."""


@dataclass(frozen=True)
class Acknowledged:
    """An acknowledged save."""

    line_and_step: tuple[int, int]
    save_order: tuple[int, int]

    @classmethod
    def of(cls, commit: CommitRecord) -> Acknowledged:
        """Return the save of a commit record."""
        return cls((commit.line, commit.step), commit.save_order)


class TierSimulation:
    """One run of jobs and drains."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._draw = random.Random(seed)
        self._places = Places(folder, seed)
        self._memory, self._record = self._places.memory, self._places.record
        self._has_new_memories = self._draw.random() < 0.5
        """Whether each job gets a memory of its own, and reads those of the jobs before it."""
        self._keep = self._draw.choice([None, 1, 2])
        sleeps, kills = self._draw.choice([0.02, 0.1]), self._draw.choice([0.001, 0.004])
        scheduler = ProcessScheduler(self._draw, sleeps, kills, self._draw.choice([0.0, 0.0, 0.02]))
        self.interleaving = Interleaving(scheduler, self._check)
        self.faults = Faults(self.interleaving, seed)
        for _ in range(self._draw.choice([0, 1, 2])):
            self.faults.begin(self._draw, self._draw.randrange(900))
        self._is_faulty = self._draw.random() < 0.7
        """Whether faults also begin when an actor begins, and when a job ends."""
        self._environ = PerProcess()
        self._memories: list[Path] = []
        """The memories of the jobs so far, the newest first."""
        self._previous = ""
        """The actor that was added last."""
        self._jobs: list[str] = []
        self._newest: Acknowledged | None = None
        """The save that was acknowledged last to a job that no later one had replaced."""
        self._commits: dict[Path, dict[int, CommitRecord]] = {}
        """The committed steps of each tier, after the last step."""
        self._begun: dict[str, int] = {}
        """The step of the run at which each actor began."""
        self._older: dict[str, tuple[int, int]] = {}
        """The save that each process restored, if that was an older one than the newest, and it has not saved since."""
        self._acknowledged: set[tuple[int, int]] = set()
        """All acknowledged saves that no later job has abandoned."""
        self._due: dict[str, Acknowledged] = {}
        """The last acknowledged save of each process that is due in the repository of record."""
        self._generations: dict[str, int] = {}
        """The generation of each of these processes in the repository of record."""
        self._ended: dict[str, int] = {}
        """The step of the run at which each job began to end."""
        self._overlapping: set[str] = set()
        """The jobs that began while an earlier one still ran."""
        self._removed: set[tuple[Path, str]] = set()
        """The files in memories that were removed because they read as damaged."""
        self._broken: list[str] = []
        self._warned: set[str] = set()
        """The processes that have logged a warning."""
        self.saves = self.restores = self.drains = self.clean_ends = 0

    # --- actors ----------------------------------------------------------------------------------------------------

    def add_job(self) -> None:
        """Add a job that begins when the actor before it has ended, or does not end for long."""
        number = len(self._jobs)
        count, end = self._draw.choice([0, 1, 3, 5]), self._draw.choice(["close", "close", "fail"])
        memory = self._memory / (str(number) if self._has_new_memories else "0")
        name = f"job{number}"
        self._jobs.append(name)
        self._add(name, lambda: self._run_job(memory, count, end == "close"))

    def add_drain(self) -> None:
        """Add what `ckpt-run` does after its last job: it copies the memories, and deletes them if nobody uses them."""
        self._add(f"drain{len(self._jobs)}", self._drain)

    def _add(self, name: str, work: Callable[[], None]) -> None:
        before, self._previous = self._previous, name
        patience = self._draw.choice([30, 300, 5_000, 5_000, 5_000])

        def run() -> None:
            while (
                before and self.interleaving.is_alive(before) and len(self.interleaving.steps) < self._begun[before] + patience
            ):
                self.interleaving.wait(600)
            self._begun[name] = len(self.interleaving.steps)
            self._perhaps_begin_fault()
            work()

        self._begun[name] = 1_000_000
        self.interleaving.add(name, run)

    def _perhaps_begin_fault(self) -> None:
        if self._is_faulty and self._draw.random() < 0.25:
            self.faults.begin(self._draw)

    def _run_job(self, memory: Path, count: int, ends_cleanly: bool) -> None:
        before = [path for path in self._memories if path != memory]
        self._memories = [memory, *before]
        self._environ["CKPT_MEMORY"] = str(memory)
        self._environ["CKPT_MEMORY_BEFORE"] = " ".join(map(str, before))
        began = len(self.interleaving.steps)
        if sum(map(self.interleaving.is_alive, self._jobs[: self._jobs.index(process_of(current_actor_name()))])):
            self._overlapping.add(process_of(current_actor_name()))
        try:
            tiers = TierManager(
                self._places.record_url, EVERY, self._keep, [Tier("memory", keep=1, limit=1 << 30)], SingleProcessGroup()
            )
            try:
                self._train(tiers, count, began)
            except Exception:  # not if the process was killed
                tiers.close(False)
                raise
            if ends_cleanly:
                self._abandon_later_saves(tiers)
            self._perhaps_begin_fault()
            self._ended[process_of(current_actor_name())] = len(self.interleaving.steps)
            tiers.close(ends_cleanly)
            if ends_cleanly:
                self._clean_end(tiers)
        except CkptError:
            pass

    def _train(self, tiers: TierManager, count: int, began: int) -> None:
        start = self._restore(tiers, began)
        for step in range(start, start + count):
            self._save(tiers, step)
            if self._draw.random() < 0.3:
                self._wait(tiers)

    def _restore(self, tiers: TierManager, began: int) -> int:
        expected = self._newest if self._is_newest(tiers) else None
        found = load_newest_on_all_ranks(tiers.repository, False, LoadRequest(), load_checkpoint)
        restored = None if found is None else Acknowledged.of(found[1][0])
        if found is not None:
            commit, value = found[1]
            self._require(value == state_of_save(commit), f"step {commit.step} has other values than were saved")
        is_older = expected is not None and (
            restored is None or (restored.line_and_step < expected.line_and_step and restored.save_order < expected.save_order)
        )
        if is_older:
            process = process_of(current_actor_name())
            self._require(self.faults.were_active_since(began), f"{restored} was restored instead of {expected}")
            self._require(process in self._warned, f"{restored} was restored instead of {expected}, without a warning")
            self._older[process] = (-1, -1) if restored is None else restored.save_order
        if expected is not None and restored is not None and restored.line_and_step > expected.line_and_step:
            self._newest = restored  # a replaced job has saved it to its own memory; the training continues from there
        self.restores += found is not None
        start = 0 if found is None else found[0] + 1
        tiers.nearest.lineage.note_restored(start - 1)
        tiers.load_ended(start - 1)
        return start

    def _save(self, tiers: TierManager, step: int) -> None:
        process = process_of(current_actor_name())
        self._abandon_later_saves(tiers)
        handle, _ = tiers.save(step, {}, Options(overwrite=True), False, False)
        if handle.error() is None and self._is_newest(tiers):
            self._newest = Acknowledged.of(handle.checkpoint().commit)
            self._acknowledged.add(self._newest.save_order)
            self.saves += 1
            if tiers.is_due_by_number(step):
                self._due[process] = self._newest
                self._generations[process] = tiers._open_tiers[-1].session.writer_lease.generation

    def _abandon_later_saves(self, tiers: TierManager) -> None:
        """If the job restored an older step than the newest, its first save or clean end abandons what was saved after that."""
        restored = self._older.pop(process_of(current_actor_name()), None)
        if restored is not None and self._is_newest(tiers):
            self._newest = None
            self._acknowledged = {order for order in self._acknowledged if order <= restored}

    def _wait(self, tiers: TierManager) -> None:
        tiers.wait()
        due = self._due.get(process_of(current_actor_name()))
        if due is not None and self._is_newest(tiers):
            self._require(self._has(self._record, due), f"the repository of record lacks {due} after wait")

    def _clean_end(self, tiers: TierManager) -> None:
        self.clean_ends += 1
        is_alone = process_of(current_actor_name()) not in self._overlapping  # an earlier job could delete what this one copies
        if self._newest is not None and is_alone and self._is_newest(tiers):
            self._require(
                self._has(self._record, self._newest), f"the repository of record lacks {self._newest} after a clean end"
            )

    def _is_newest(self, tiers: TierManager) -> bool:
        """Return whether no later job or drain has taken over the repository of record."""
        return self._newest_generation() <= tiers._open_tiers[-1].session.writer_lease.generation

    def _newest_generation(self) -> int:
        return lease_records.newest_generation(self._plain(self._record))

    def _drain(self) -> None:
        expected, memories = self._newest, [path for path in self._memories if path.exists()]
        is_in_use = any(map(self.interleaving.is_alive, self._jobs))
        report = memory_drain.drain_memories(*memories) if memories else memory_drain.DrainReport()
        if report.has_failed:
            return
        self.drains += 1
        if memories and memories[:1] == self._memories[:1] and f"from {memories[0].as_uri()}/" in report.text:
            expected = self._newest  # also a step that a job saved until it lost its lease to the drain
        if expected is not None:
            self._require(self._has(self._record, expected), f"the repository of record lacks {expected} after {report.text!r}")
        if not is_in_use:
            for memory in memories:
                shutil.rmtree(memory, ignore_errors=True)
            self._memories = [path for path in self._memories if path not in memories]

    # --- promises --------------------------------------------------------------------------------------------------

    def _require(self, is_kept: bool, promise: str) -> None:
        """Note a broken promise. An error would be taken for one of the store by the code of the product."""
        if not is_kept:
            self._broken.append(promise)

    def _plain(self, place: Path) -> Repository:
        return Repository(self._places.plain_store(place))

    def _has(self, place: Path, save: Acknowledged) -> bool:
        return any(commit.save_order >= save.save_order for commit in self._read(place).values())

    def _check(self) -> None:
        steps = self.interleaving.steps
        if steps and not is_read(steps[-1]) and not steps[-1].endswith("waits"):
            for place in self._places.all():
                before, self._commits[place] = self._commits.get(place, {}), self._read(place)
                self._check_changes(place, before, self._commits[place])
            if self._newest is not None:
                is_there = any(self._has(place, self._newest) for place in self._places.all())
                self._require(is_there, f"{self._newest} was acknowledged, and is lost")
        if self._broken:
            raise AssertionError(self._broken[0])

    def _read(self, place: Path) -> dict[int, CommitRecord]:
        """Return the committed steps of a tier, and check that each has all of its files."""
        store = self._places.plain_store(place)
        sizes = {entry.name: entry.nbytes for entry in store.list("steps")}
        found = {}
        for name in sizes:
            if name.endswith("/commit.json"):
                try:
                    commit = decode_commit(store.get(name), name)
                except NotFound:  # a reservation of a bucket
                    continue
                found[commit.step] = commit
                for file in (*commit.manifests, *commit.trees, *commit.packs):
                    is_there = sizes.get(file.name) == file.nbytes
                    if not is_there and place != self._record and self._is_damaged_copy(place, file):
                        self._removed.add((place, file.name))
                    is_removed = (place, file.name) in self._removed
                    self._require(is_there or is_removed, f"step {commit.step} of {place} has lost {file.name}")
        return found

    def _is_damaged_copy(self, place: Path, file: StepFile) -> bool:
        """Return whether a file of a step was read as damaged in a memory, and another tier has it."""
        others = (self._places.plain_store(other) for other in self._places.all() if other != place)
        return self.faults.was_damaged("memory", file.name) and any(store.exists(file.name) for store in others)

    def _check_changes(self, place: Path, before: dict[int, CommitRecord], now: dict[int, CommitRecord]) -> None:
        for step, commit in before.items():
            if (later := now.get(step)) is not None:
                kind, now_step = "run" if place == self._record else "memory", len(self.interleaving.steps)
                is_right = later.save_order >= commit.save_order
                is_right |= self.faults.is_damaged_since(kind, file_names.commit_name(step), now_step)
                self._require(is_right, f"step {step} of {place} was replaced by an earlier save")
                continue
            if commit.save_order not in self._acknowledged:
                continue
            newer = sum((other.line, other.step) > (commit.line, step) for other in now.values())
            keep = self._keep if place == self._record else 1
            is_expired = keep is not None and newer >= keep
            self._require(
                is_expired or (place != self._record and self._has(self._record, Acknowledged.of(commit))),
                f"step {step} of {place} was deleted, and {newer} newer ones are there",
            )
            self._check_deletion(place, commit)

    def _check_deletion(self, place: Path, commit: CommitRecord) -> None:
        """Check the deletion of a step in memory by the job that runs now."""
        process, save = process_of(self.interleaving.steps[-1]), Acknowledged.of(commit)
        if place == self._record or process not in self._jobs:
            return
        if (ended := self._ended.get(process)) is not None and save == self._newest:
            is_damaged = self.faults.is_damaged_since("run", file_names.commit_name(commit.step), ended)
            self._require(not is_damaged, f"step {commit.step} of {place} was deleted, and its record elsewhere is damaged")
        is_newest = self._newest_generation() <= self._generations.get(process, 0)
        if save == self._due.get(process) and is_newest and not self.faults.were_active_since(0):
            self._require(self._has(self._record, save), f"step {commit.step} of {place} was deleted before it was promoted")

    def _publish(self, repo: Repository, lease: WriterLease, commit: CommitRecord, require_replaceable: Any) -> None:
        """Publish a record, and check that the writer had not been replaced before."""
        is_replaced = lease_records.newest_generation(self._plain(self._places.of_url(repo.url))) > lease.generation
        _publish_commit(repo, lease, commit, require_replaceable)
        self._require(
            not is_replaced, f"step {commit.step} was committed by writer {lease.generation}, which was replaced before"
        )

    # --- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Let the actors take turns until each has ended or was killed."""
        with self._decided_by_the_seed():
            errors = self.interleaving.run()
        assert not any(errors.values()), errors

    @contextmanager
    def _decided_by_the_seed(self) -> Iterator[None]:
        """Let the code of the product use the stepped stores, and give each process its own tables and environment."""
        environ = SimpleNamespace(environ=self._environ)
        with separate_processes(self.interleaving), self._recorded_warnings(), ExitStack() as patches:
            for owner, name, new in (
                (repository, "_open_store", self._open_store),
                (previous_memory, "os", environ),
                (tier_spec, "os", environ),
                (manager, "save_after_failure", lambda *call: (save(*call), None)),
                (manager, "warn_user", lambda _: None),
                (commit_publication, "publish_commit", self._publish),
            ):
                patches.enter_context(patch.object(owner, name, new))
            yield

    def _open_store(self, url: Any) -> Any:
        return self._places.open(url, self.faults, self.interleaving)

    @contextmanager
    def _recorded_warnings(self) -> Iterator[None]:
        """Note which processes log a warning, and show none."""
        log, handler = logging.getLogger("ckpt"), logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._warned.add(process_of(current_actor_name()))  # type: ignore[method-assign]
        with warnings.catch_warnings(), patch.object(log, "propagate", False):
            warnings.simplefilter("ignore")
            log.addHandler(handler)
            try:
                yield
            finally:
                log.removeHandler(handler)
