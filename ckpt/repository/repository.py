"""The class Repository, all steps of one run under one URL: its files, its commit records, and their order.

Files:

    ckpt.json                                  marker: format version, id
    generations/<n>.json                       lease records: writer_lease.py
    steps/<step>/pack/<rank>-<generation>-<serial>-<n>.pack
    steps/<step>/manifest/<rank>-<generation>-<serial>.parquet, .json
    steps/<step>/part/…                        rank parts, deleted after the commit: saving/rank_parts.py
    steps/<step>/commit.json                   written last; makes the step exist
    lines/<n>.json                             a roll-back has opened training line n: line_records.py
    meet/                                      the rendezvous of ranks: groups/store_rendezvous.py
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt.errors import FormatError, StepNotFound, bad_sectors_as_damage
from ckpt.format import json_records
from ckpt.format.json_records import CommitRecord
from ckpt.format.signature import NO_KEYS, KeyOption, Keys, as_keys
from ckpt.format.training_lines import StepOrder, TrainingLine, order_by_number, order_steps
from ckpt.groups.store_rendezvous import RENDEZVOUS_FOLDER
from ckpt.repository import line_records
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.file_names import STEPS_FOLDER, commit_name
from ckpt.repository.line_records import StepLines
from ckpt.storage.base.errors import AlreadyExists, CkptError, InvalidArgument, NotFound, StoreError, is_damage
from ckpt.storage.base.store import Entry, Store
from ckpt.storage.urls import open_store
from ckpt.support.validation import as_integer

log = logging.getLogger("ckpt")

MARKER = "ckpt.json"

DIRECTORY_VARIABLE = "CKPT_DIR"
"""The environment variable with the URL that is used if the program gives none. `ckpt-run --dir` sets it."""

REPOSITORY_FOLDER = "ckpt"
"""The folder name of a repository inside the folder of another program."""

Url = str | os.PathLike[str] | Store

_NO_STEP_ADVICE = "check the URL, or save a step first"


def new_marker() -> bytes:
    """Return the content of the marker file of a new repository, with a new id."""
    return json_records.encode("repository", {"id": uuid.uuid4().hex})


@dataclass(frozen=True, slots=True)
class _Marker:
    """The fields that ckpt.json must have."""

    id: str


class Repository:
    """All committed steps at one URL. `ckpt.open` returns it.

        repo = ckpt.open("/data/run")
        repo.steps(), repo.latest(), repo[10], 10 in repo, len(repo)

    Iterating gives the `Checkpoint` of each step, from the oldest to the newest. `repo[10]` raises StepNotFound if the step is
    not committed, IntegrityError if its commit record is damaged or not signed with one of the keys, and InvalidArgument for an
    index that is not a whole number. Each access reads the store, so the result is current.
    """

    def __init__(self, store: Store, keys: Keys = NO_KEYS) -> None:
        self.store = store
        self.url = store.url
        self.keys = keys
        """With keys, a step is valid only if one of them signed it. The first key signs new steps."""

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"

    @property
    def tiers(self) -> tuple[Repository, ...]:
        """The repository of each tier, the nearest first; this one alone if it has no tiers."""
        return (self,)

    # --- the marker --------------------------------------------------------------------------------------------

    def _has_marker(self) -> bool:
        """Return whether the marker exists; raise FormatError or IntegrityError if it can't be used."""
        try:
            json_records.load(self.store, "repository", MARKER)
        except NotFound:
            return False
        return True

    def identity(self) -> str:
        """Return the id of this repository, which differs from that of an earlier one at the same URL.

        Raises NotFound if there is no marker, and FormatError or IntegrityError if it can't be used.
        """
        where = f"{self.url}/{MARKER}"
        return json_records.parse_body(_Marker, json_records.load(self.store, "repository", MARKER), where).id

    def check(self) -> None:
        """Raise StepNotFound if nothing exists at the URL yet; FormatError or IntegrityError if what exists can't be used."""
        if self._has_marker():
            return
        has_steps, other = any(self.store.list_folders(STEPS_FOLDER)), self._file_outside_rendezvous()
        if self._has_marker():  # another process has just created it
            return
        if has_steps:
            raise FormatError(f"{self._missing_marker_text()}; restore it from a copy")
        if other is None:
            raise StepNotFound(f"nothing has been saved to {self.url} yet; check the path, or save to it first")
        raise FormatError(f"{self.url} is not a checkpoint repository (no {MARKER}); check the path")

    def _missing_marker_text(self) -> str:
        return f"{self.url} has steps, and its {MARKER} is missing"

    def _file_outside_rendezvous(self) -> Entry | None:
        """Return a file that does not belong to the rendezvous; None if there is none.

        Ranks meet there before the repository exists.
        """
        return next((e for e in self.store.list() if not e.name.startswith(f"{RENDEZVOUS_FOLDER}/")), None)

    def ensure(self) -> None:
        """Create the repository if it does not exist; raise FormatError if the folder has other files."""
        if self._has_marker():
            return
        has_steps, other = any(self.store.list_folders(STEPS_FOLDER)), self._file_outside_rendezvous()
        if other is not None and not self.store.exists(MARKER):  # a marker now means that another process was faster
            if has_steps:
                raise FormatError(f"{self._missing_marker_text()}; restore it from a copy, or name an empty or a new folder")
            raise FormatError(
                f"{self.url} has other files (such as {other.name}) and is not a checkpoint repository; "
                "name an empty or a new folder"
            )
        try:
            self.store.put_new(MARKER, new_marker())
        except (AlreadyExists, NotFound):  # another process was faster; NotFound: its sweep has removed our temporary file
            pass
        self.check()

    # --- steps -------------------------------------------------------------------------------------------------

    def step_numbers(self) -> list[int]:
        """Return the numbers of all steps that have a folder, committed or not, in ascending order."""
        return sorted(int(n) for n in self.store.list_folders(STEPS_FOLDER) if n.isdigit() and str(int(n)) == n)

    def commit(self, step: int) -> CommitRecord:
        """Return the commit record of a step; StepNotFound if it is missing, IntegrityError if it is damaged."""
        try:
            return self.record(step)
        except NotFound:
            have = self._existing_steps()
            others = f"it has {steps_text(have)}" if have else _NO_STEP_ADVICE
            raise StepNotFound(f"{self.url} has no committed step {step}; {others}") from None

    def _existing_steps(self) -> list[int]:
        """Return the numbers of the steps with a commit record, usable or not, for a message; none if the store fails."""
        try:
            return [step for step in self.step_numbers() if self.store.exists(commit_name(step))]
        except StoreError:
            return []

    def no_step_error(self) -> StepNotFound:
        """Return the error of a load if no step is committed."""
        return StepNotFound(f"{self.url} has no committed step to load: {_NO_STEP_ADVICE}")

    def record(self, step: int) -> CommitRecord:
        """Return the commit record stored for a step.

        Raises NotFound if it is missing, IntegrityError if it is damaged, on a bad sector or that of another step, and
        StoreError if it is unreadable now.
        """
        with bad_sectors_as_damage(f"{self.url}/{commit_name(step)}"):
            return self.decode(step, self.store.get_up_to(commit_name(step), json_records.MAX_RECORD_BYTES))

    def decode(self, step: int, data: bytes) -> CommitRecord:
        """Return the commit record of a step in `data`, and check its signature if the repository has keys.

        Raises FormatError, IntegrityError and SignatureError as `decode_commit` does.
        """
        return json_records.decode_commit(data, f"{self.url}/{commit_name(step)}", self.keys, step)

    def checkpoint(self, commit: CommitRecord, rank: int = 0) -> Checkpoint:
        """Return the checkpoint of a record that `decode` or `record` returned, as the given rank loads it."""
        return Checkpoint(self.store, commit, rank, self.keys)

    def commits(self) -> Iterator[CommitRecord]:
        """Yield the records of all committed steps in ascending order; skip a damaged one, with a line in the log.

        Raises:
            FormatError: A newer version has written a record.
            StoreError: A record can't be read now.
        """
        for step in self.step_numbers():
            try:
                yield self.record(step)
            except NotFound:
                continue
            except CkptError as error:
                self._skip_damaged(step, error)

    def steps(self) -> list[int]:
        """Return the numbers of the committed steps, the newest last; skip a damaged one, with a line in the log.

        They ascend unless a run went back to an older step: what was saved last is then the newest, whatever its number.

        Raises:
            StepNotFound: Nothing exists at the URL any more.
            FormatError: The marker of the repository is missing, or a newer version has written it or a step.
            IntegrityError: The marker of the repository is damaged.
            StoreError: The marker or the record of a step can't be read now.
        """
        self.check()
        found = self.lines()
        for step, error in found.errors.items():
            self._skip_damaged(step, error)
        return [step for step in found.order.steps if step in found.known]

    def _skip_damaged(self, step: int, error: CkptError) -> None:
        """Log that a step is skipped because it is damaged; raise the error if it is not damage."""
        if not is_damage(error):
            raise error
        log.warning("step %d of %s is skipped: %s", step, self.url, error)

    # --- their order -------------------------------------------------------------------------------------------

    def line_numbers(self) -> list[int]:
        """Return the numbers of all training lines but the first, ascending; empty if no run has gone back to an older step."""
        return line_records.line_numbers(self.store)

    def record_line(self, line: TrainingLine) -> None:
        """Record a new training line, before the first commit on it. From then on, records and not numbers order the steps."""
        line_records.write_line(self.store, line)

    def lines(self, numbers: Iterable[int] | None = None) -> StepLines:
        """Return the training line of each committed step, and the order of all steps.

        numbers: what `step_numbers` returned; None to call it.

        Raises StoreError or FormatError if the record of a step is unreadable and the record of the newest line can't be read.
        """
        known: dict[int, TrainingLine] = {}
        errors: dict[int, CkptError] = {}
        for step in self.step_numbers() if numbers is None else numbers:
            try:
                known[step] = self.record(step).training_line
            except NotFound:
                continue
            except CkptError as error:
                errors[step] = error
        return StepLines(known, errors, self.order_of(known, errors))

    def order_of(self, known: Mapping[int, TrainingLine], unknown: Collection[int]) -> StepOrder:
        """Return the order of the steps. known: their lines. unknown: the steps whose records can't be read."""
        return order_steps(known, unknown, line_records.newest_opened_line(self.store) if unknown else None)

    def order(self) -> StepOrder:
        """Return the steps in the order in which they were saved, those with an unreadable record included.

        With one training line no record is read, so the result may include steps that are not committed.
        """
        if not self.line_numbers():
            return order_by_number(self.step_numbers())
        found = self.lines()
        for step, error in found.errors.items():
            log.warning("the training line of step %d of %s is unknown: %s", step, self.url, error)
        return found.order

    def newest(
        self, is_accepted: Callable[[int], bool] = lambda step: True, numbers: Sequence[int] | None = None
    ) -> tuple[int, int]:
        """Return line and number of the newest committed step for which `is_accepted` is true; (-1, -1) if there is none.

        numbers: what `step_numbers` returned; None to call it.

        The pairs of two tiers can be compared: the larger one is newer.

        With one training line no record is read. Otherwise a damaged step is left out, and an error is raised if a record can't
        be read whose step may be the newest.
        """
        if not self.line_numbers():
            numbers = self.step_numbers() if numbers is None else numbers
            steps = (step for step in reversed(numbers) if is_accepted(step))
            return next(((0, step) for step in steps if self.store.exists(commit_name(step))), (-1, -1))
        found = self.lines(numbers)
        step = found.newest(is_accepted)
        return (-1, -1) if step is None else (found.known[step].number, step)

    def latest(self, skip: Collection[int] = ()) -> Checkpoint | None:
        """Return the newest committed step that is complete and not in `skip`, or None.

            checkpoint = ckpt.open(url).latest()

        A damaged step is skipped with a warning in the log. A load falls back in `ckpt/loading/newest_step_load.py`.

        Raises:
            StepNotFound: Nothing exists at the URL any more.
            FormatError: The marker of the repository is missing, or a newer version has written it or the newest step.
            IntegrityError: The marker of the repository is damaged.
            StoreError: The marker or the newest step can't be read now.
        """
        self.check()
        for step in self.order().newest_first():
            if step in skip:
                continue
            try:
                found = self.checkpoint(self.record(step))
                found.require_complete()
                return found
            except NotFound:  # not committed, or deleted meanwhile
                continue
            except CkptError as error:
                if not is_damage(error):
                    raise
                log.warning("falling back from step %d of %s: %s", step, self.url, error)
        return None

    def __getitem__(self, step: int) -> Checkpoint:
        if as_integer(step) is None:
            raise InvalidArgument(f"step must be a whole number, 0, 1, 2 …, and not {step!r:.60}")
        return self.of_rank(step, 0)

    def of_rank(self, step: int, rank: int) -> Checkpoint:
        """Return a step as one rank of a group loads it, with the rank's own values where each rank has its own."""
        self.check()
        return self.checkpoint(self.commit(step), rank)

    def __iter__(self) -> Iterator[Checkpoint]:
        for step in self.steps():
            with suppress(NotFound):  # it was deleted meanwhile
                yield self.checkpoint(self.record(step))

    def __len__(self) -> int:
        return len(self.steps())

    def __contains__(self, step: object) -> bool:
        return step in self.steps()


def open_repository(url: Url, key: KeyOption | Keys = None) -> Repository:
    """Return the repository at a URL or on a store, without a check that it exists.

    key: as for `ckpt.save`; None means the key file of the environment.
    """
    return Repository(url if isinstance(url, Store) else _open_store(url), as_keys(key))


def resolve_url(url: Url | None) -> Url:
    """Return `url`, or without one the URL in the environment. Raises InvalidArgument if there is none."""
    if url is not None:
        return url
    if not (from_environment := os.environ.get(DIRECTORY_VARIABLE)):
        raise InvalidArgument(
            f"no repository is named: give its URL, or start this by `ckpt-run --dir URL` ({DIRECTORY_VARIABLE})"
        )
    return from_environment


def _open_store(url: str | os.PathLike[str]) -> Store:
    """Return the store of a URL, which may be a namespace (`ckpt://`)."""
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not text or not isinstance(text, str) or "\0" in text:  # an empty path would mean the current folder
        shown = repr(url) if isinstance(url, (str, os.PathLike)) else f"an object of type {type(url).__name__}"
        raise InvalidArgument(f"{shown} names no repository: give a path or a URL")
    if text.startswith("ckpt://"):
        from ckpt.aggregator.interfaces.store import NamespaceStore  # imports Arrow Flight, which takes long

        return NamespaceStore(text)
    return open_store(text)


def steps_text(steps: list[int]) -> str:
    """Return "steps 1, 2, 3" for a message, shortened if there are many."""
    if len(steps) > 8:
        return f"steps {', '.join(map(str, steps[:3]))} … {', '.join(map(str, steps[-3:]))}"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
