"""Determines the state of steps from their commit records and one listing; damage is reported, not raised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ckpt.block_io.step_verification import verify_blocks
from ckpt.format import json_records
from ckpt.format.json_records import CommitRecord
from ckpt.format.manifest import Manifest
from ckpt.format.pack import step_of_file
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.file_names import STEPS_FOLDER, commit_name, step_folder
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import CkptError, NotFound, is_damage
from ckpt.storage.base.plural import format_count
from ckpt.storage.base.store import ByteProgress, Entry
from ckpt.tools.common import format_size

StepState = Literal["ok", "incomplete", "damaged", "unreadable", "unfinished"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """The state of one step.

    `incomplete`: files are missing or have another length. `damaged`: its record or data differ from what was written.
    `unreadable`: its files can't be read now, or not by this version. `unfinished`: it has no commit record.
    """

    step: int
    state: StepState
    commit: CommitRecord | None
    problems: tuple[str, ...] = ()
    """Messages about what is wrong."""
    bad_files: frozenset[str] = frozenset()
    """Files of the step that are missing or have another length."""

    @property
    def has_failed(self) -> bool:
        """Whether a committed step is not good any more. An unfinished step has not failed: its save may be running."""
        return self.state in ("incomplete", "damaged", "unreadable")


@dataclass(frozen=True, slots=True)
class LeafReport:
    """One array of a step."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored_bytes: float
    """Its share of the bytes in the packs, with those of the bases of its differences."""
    codecs: tuple[str, ...]
    """The configurations of the codecs of its blocks, without blocks that have no codec."""
    written_in: tuple[int, ...]
    """The steps whose packs contain its blocks."""
    bases_in: tuple[int, ...]
    """The steps whose packs contain the blocks to which its blocks are differences."""
    missing: bool
    """Whether a pack with one of its blocks is missing or has another length."""


def step_reports(repo: Repository, steps: Iterable[int]) -> list[StepReport]:
    """Return the state of each step. Records are read before the listing, so that a step that is being saved is unfinished.

    A deleted step is left out, if it has only packs to which others of these steps refer.
    """
    found = [_check_record(repo, step) for step in steps]
    needed = {f.name for r in found if r.commit for f in _record_files(r.commit)}
    folders = {_folder_of_file(name) for name in needed} | {step_folder(r.step) for r in found}
    files = {e.name: e.nbytes for e in _list_files(repo, folders)}
    left_over = {_folder_of_file(name) for name in files.keys() - needed}
    reports = []
    for report in found:
        if report.state == "unfinished" and needed and step_folder(report.step) not in left_over:
            continue
        report = _check_files(report, files)
        if report.state == "incomplete" and _check_record(repo, report.step).state == "unfinished":
            continue  # the step was deleted after its record was read
        reports.append(report)
    return reports


def _check_record(repo: Repository, step: int) -> StepReport:
    name = commit_name(step)
    where = f"{repo.url}/{name}"
    try:
        commit = repo.record(step)
    except NotFound:
        return StepReport(step, "unfinished", None)
    except CkptError as error:
        return StepReport(step, state_of_error(error), None, (str(error),))
    if commit.step != step:
        return StepReport(step, "damaged", None, (f"{where} is the record of step {commit.step}",))
    return StepReport(step, "ok", commit)


def state_of_error(error: CkptError) -> StepState:
    """Return the state of a step whose record or data raise this error."""
    return "damaged" if is_damage(error) else "unreadable"


def _record_files(commit: CommitRecord) -> tuple[json_records.StepFile, ...]:
    return commit.manifests + commit.trees + commit.packs


def _folder_of_file(name: str) -> str:
    return "/".join(name.split("/")[:2])


def _list_files(repo: Repository, folders: set[str]) -> Iterator[Entry]:
    if len(folders) > 8:  # one listing of all steps; for few folders, listing each is faster
        yield from repo.store.list(STEPS_FOLDER)
        return
    for folder in folders:
        yield from repo.store.list(folder)


def _check_files(report: StepReport, files: dict[str, int]) -> StepReport:
    if report.state == "unfinished":
        prefix = f"{step_folder(report.step)}/"
        sizes = [nbytes for name, nbytes in files.items() if name.startswith(prefix)]
        content = f"{format_count(len(sizes), 'file')}, {format_size(sum(sizes))}"
        problem = f"no commit record: a save still runs, or a save or a deletion was interrupted ({content})"
        return StepReport(report.step, "unfinished", None, (problem,))
    if report.commit is None:
        return report
    problems, bad = [], set()
    for file in _record_files(report.commit):
        nbytes = files.get(file.name)
        if nbytes != file.nbytes:
            bad.add(file.name)
            is_now = "is missing" if nbytes is None else f"has {nbytes:,} bytes instead of {file.nbytes:,}"
            problems.append(f"{file.name} {is_now}")
    return StepReport(report.step, "incomplete" if bad else "ok", report.commit, tuple(problems), frozenset(bad))


def report_leaves(checkpoint: Checkpoint, bad_files: frozenset[str]) -> dict[str, LeafReport]:
    """Return a report of each array of a step, by the name of its leaf. bad_files: those of the report of the step."""
    found = {}
    for name, rows in checkpoint.manifest().by_leaf().items():
        stored_rows = [r for r in rows if r.pack is not None]
        found[name] = LeafReport(
            name=name,
            dtype=rows[0].dtype,
            shape=rows[0].global_shape,
            nbytes=sum(r.nbytes for r in rows),
            stored_bytes=sum(r.whole_read_bytes * r.nbytes / r.raw for r in stored_rows if r.raw),
            codecs=tuple(sorted({r.codec for r in stored_rows if r.codec is not None})),
            written_in=tuple(sorted({step_of_file(r.pack) for r in rows if r.pack is not None})),
            bases_in=tuple(sorted({step_of_file(r.base.pack) for r in stored_rows if r.base is not None})),
            missing=any(r.pack in bad_files or (r.base is not None and r.base.pack in bad_files) for r in stored_rows),
        )
    return found


def select_manifest(checkpoint: Checkpoint, leaves: Iterable[str] | None = None) -> Manifest:
    """Return the manifest of a step, or the part of it with these leaves."""
    manifest = checkpoint.manifest()
    if leaves is None:
        return manifest
    return manifest.select(leaves)


def stored_bytes(manifest: Manifest) -> int:
    """Return the bytes that `verify_manifest` reads."""
    return manifest.stored_bytes()


def verify_manifest(checkpoint: Checkpoint, manifest: Manifest, advance: ByteProgress) -> int:
    """Read and check every block of a manifest; return the bytes read, or raise IntegrityError with leaf and file."""
    return verify_blocks(checkpoint.store, manifest, checkpoint.where, advance)
