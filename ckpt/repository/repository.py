"""All checkpoints of one run under one URL: where things lie, which steps exist, and how a record is read back.

Files:

    ckpt.json                                  marker: format version, id
    generations/<n>.json                       who writes: claim.py
    steps/<step>/pack/<rank>-<generation>-<n>.pack
    steps/<step>/manifest/<rank>-<generation>-<n>.parquet, .json
    steps/<step>/commit.json                   written last; makes the step exist
    lines/<n>.json                             a roll-back has opened line n of training: lines.py
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ckpt.errors import FormatError, StepNotFound
from ckpt.format import json_records
from ckpt.format.json_records import CommitRecord
from ckpt.format.signature import NO_KEYS, KeyOption, Keys, as_keys
from ckpt.format.training_lines import StepOrder, TrainingLine, order_by_number, order_steps
from ckpt.repository.checkpoint import Checkpoint
from ckpt.storage.base.errors import AlreadyExists, CkptError, IntegrityError, InvalidArgument, NotFound
from ckpt.storage.base.store import Entry, Store
from ckpt.storage.urls import open_store

log = logging.getLogger("ckpt")

MARKER = "ckpt.json"

DIRECTORY_VARIABLE = "CKPT_DIR"
"""The environment variable that names the repository where the program names none. `ckpt-run --dir` sets it."""

Url = str | os.PathLike[str] | Store


def new_marker() -> bytes:
    """What marks a new repository."""
    return json_records.encode("repository", {"id": uuid.uuid4().hex})


def step_folder(step: int) -> str:
    """Where a step lies."""
    return f"steps/{step}"


def commit_name(step: int) -> str:
    """The record that makes a step exist."""
    return f"steps/{step}/commit.json"


def _line_record_name(number: int) -> str:
    return f"lines/{number:08}.json"


@dataclass(frozen=True, slots=True)
class _Marker:
    """What ckpt.json must hold."""

    id: str


class Repository:
    """Steps by number, read lazily. `repo[10]`, `repo.steps()`, `repo.latest()`."""

    def __init__(self, store: Store, keys: Keys = NO_KEYS) -> None:
        self.store = store
        self.url = store.url
        self.keys = keys
        """With keys, a step exists only where one of them signed it, and what is saved is signed with the first."""

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"

    @property
    def places(self) -> tuple[Repository, ...]:
        """The repositories that this one is made of, where it is kept in several tiers."""
        return (self,)

    # --- the marker --------------------------------------------------------------------------------------------

    def _has_marker(self) -> bool:
        """Whether the marker is there; raise what is wrong with it."""
        try:
            json_records.load(self.store, "repository", MARKER)
        except NotFound:
            return False
        return True

    def identity(self) -> str:
        """What tells this repository from one that was at the same URL before; NotFound where there is none."""
        where = f"{self.url}/{MARKER}"
        return json_records.parse_body(_Marker, json_records.load(self.store, "repository", MARKER), where).id

    def check(self) -> None:
        """Raise StepNotFound where nothing is at the URL yet, FormatError where this version can read no repository there."""
        if not self._has_marker():
            if any(self.store.list_folders("steps")):
                raise FormatError(f"{self._missing_marker_text()}; restore it from a copy")
            if self._foreign_file() is None:
                if self._has_marker():  # another process has made it meanwhile
                    return
                raise StepNotFound(f"nothing has been saved to {self.url} yet; check the path, or save to it first")
            raise FormatError(f"{self.url} is not a checkpoint repository (no {MARKER}); check the path, or save to it first")

    def _missing_marker_text(self) -> str:
        return f"{self.url} has steps, and its {MARKER} is missing"

    def _foreign_file(self) -> Entry | None:
        """A file that is there, and is none of those by which ranks meet before the repository is made."""
        return next((e for e in self.store.list() if not e.name.startswith("meet/")), None)

    def ensure(self) -> None:
        """Make the repository if it is not there; refuse a folder that holds something else."""
        if self._has_marker():
            return
        foreign = self._foreign_file()
        if foreign is not None and not self.store.exists(MARKER):  # else another process was faster
            if foreign.name.startswith("steps/"):
                raise FormatError(f"{self._missing_marker_text()}; restore it from a copy, or name an empty or a new folder")
            raise FormatError(
                f"{self.url} holds other files (such as {foreign.name}) and is not a checkpoint repository; "
                "name an empty or a new folder"
            )
        try:
            self.store.put_new(MARKER, new_marker())
        except (AlreadyExists, NotFound):  # another one was faster; not found: it has swept our temporary file
            pass
        self.check()

    # --- steps -------------------------------------------------------------------------------------------------

    def step_numbers(self) -> list[int]:
        """The numbers that have a folder, committed or not, ascending."""
        return sorted(int(n) for n in self.store.list_folders("steps") if n.isdigit() and str(int(n)) == n)

    def commit(self, step: int) -> CommitRecord:
        """The commit record of a step; StepNotFound where there is none, IntegrityError where it is damaged."""
        try:
            commit = self.record(step)
        except NotFound:
            have = self.steps()
            others = f"it has {steps_text(have)}" if have else "it has no committed step"
            raise StepNotFound(f"{self.url} has no committed step {step}; {others}") from None
        if commit.step != step:
            raise IntegrityError(f"{self.url}/{commit_name(step)} is the record of step {commit.step}")
        return commit

    def record(self, step: int) -> CommitRecord:
        """What lies at the name of a commit record; NotFound where nothing does."""
        return self.decode(step, self.store.get_up_to(commit_name(step), json_records.MAX_RECORD_BYTES))

    def decode(self, step: int, data: bytes) -> CommitRecord:
        """The commit record in `data`, its signature checked where there are keys."""
        return json_records.decode_commit(data, f"{self.url}/{commit_name(step)}", self.keys)

    def checkpoint(self, commit: CommitRecord, rank: int = 0) -> Checkpoint:
        """The step of a record that `decode` or `record` returned."""
        return Checkpoint(self.store, commit, rank, self.keys)

    def commits(self) -> Iterator[CommitRecord]:
        """The records of all committed steps, ascending; damaged ones are left out with a warning."""
        for step in self.step_numbers():
            try:
                yield self.record(step)
            except NotFound:
                continue
            except CkptError as error:
                log.warning("step %d is left out: %s", step, error)

    def steps(self) -> list[int]:
        """The committed steps, the newest last. They ascend, but where a run went back to an older step: see `order`."""
        self.check()
        return list(order_steps({commit.step: commit.training_line for commit in self.commits()}).steps)

    # --- their order -------------------------------------------------------------------------------------------

    def line_numbers(self) -> list[int]:
        """The lines of training beside the first one, ascending; none where no run has gone back to an older step."""
        names = (entry.name.removeprefix("lines/").removesuffix(".json") for entry in self.store.list("lines"))
        return sorted(int(name) for name in names if name.isdecimal())

    def note_line(self, line: TrainingLine) -> None:
        """Before the first commit on a line: from now on the order of steps is that of their records, not of their numbers."""
        data = json_records.encode("line", {"line": line.number, "left": line.ancestry})
        with suppress(AlreadyExists):
            self.store.put_new(_line_record_name(line.number), data)

    def lines(self) -> tuple[dict[int, TrainingLine], set[int]]:
        """The line of each committed step, and the steps whose records can't be read."""
        known: dict[int, TrainingLine] = {}
        unknown: set[int] = set()
        for step in self.step_numbers():
            try:
                known[step] = self.record(step).training_line
            except NotFound:
                continue
            except CkptError as error:
                log.warning("when step %d was saved is not known: %s", step, error)
                unknown.add(step)
        return known, unknown

    def order(self) -> StepOrder:
        """The steps by when they were saved. Of steps that all are on one line no record is read, so that some may not be
        committed."""
        if not self.line_numbers():
            return order_by_number(self.step_numbers())
        return order_steps(*self.lines())

    def newest(self, wanted: Callable[[int], bool] = lambda step: True) -> tuple[int, int]:
        """Line and number of the newest committed step that is wanted; (-1, -1) where there is none. The pair can be compared
        with that of another tier."""
        lines = {} if not self.line_numbers() else self.lines()[0]
        for step in reversed(order_steps(lines).steps if lines else self.step_numbers()):
            if wanted(step) and (step in lines or self.store.exists(commit_name(step))):
                return lines[step].number if lines else 0, step
        return -1, -1

    def latest(self, skip: Collection[int] = ()) -> Checkpoint | None:
        """The newest committed step (not one of `skip`) that is complete, None where there is none."""
        for step in reversed([s for s in self.steps() if s not in skip]):
            try:
                found = self[step]
                found.require_complete()
                return found
            except CkptError as error:
                log.warning("falling back from step %d of %s: %s", step, self.url, error)
        return None

    def __getitem__(self, step: int) -> Checkpoint:
        return self.of_rank(step, 0)

    def of_rank(self, step: int, rank: int) -> Checkpoint:
        """A step as one rank of a group sees it: values of which each has its own are those of this rank."""
        self.check()
        return self.checkpoint(self.commit(step), rank)

    def __iter__(self) -> Iterator[Checkpoint]:
        return (self[step] for step in self.steps())

    def __len__(self) -> int:
        return len(self.steps())

    def __contains__(self, step: object) -> bool:
        return step in self.steps()


def open_repository(url: Url, key: KeyOption | Keys = None) -> Repository:
    """The repository at a URL (or on a store), unchecked. Without a key: that of the environment."""
    return Repository(url if isinstance(url, Store) else _open_store(url), as_keys(key))


def resolve_url(url: Url | None) -> Url:
    """What the program names, or else the environment."""
    if url is not None:
        return url
    if not (from_environment := os.environ.get(DIRECTORY_VARIABLE)):
        raise InvalidArgument(
            f"no repository is named: give its URL, or start this by `ckpt-run --dir URL` ({DIRECTORY_VARIABLE})"
        )
    return from_environment


def _open_store(url: str | os.PathLike[str]) -> Store:
    """The store of a URL, the namespace of many nodes among them."""
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not text or not isinstance(text, str) or "\0" in text:  # an empty one would mean the folder that one is in
        shown = repr(url) if isinstance(url, (str, os.PathLike)) else f"an object of type {type(url).__name__}"
        raise InvalidArgument(f"{shown} names no repository: give a path or a URL")
    if text.startswith("ckpt://"):
        from ckpt.aggregator.interfaces.store import NamespaceStore  # with Arrow Flight: only where it is used

        return NamespaceStore(text)
    return open_store(text)


def steps_text(steps: list[int]) -> str:
    """Some numbers, for a message."""
    if len(steps) > 8:
        return f"steps {', '.join(map(str, steps[:3]))} … {', '.join(map(str, steps[-3:]))}"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
