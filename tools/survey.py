"""The condition of a repository's steps, told from their records and one listing; damage is reported, not raised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ckpt import records
from ckpt.checkpoint import Checkpoint
from ckpt.manifest import Manifest, Row
from ckpt.read import verify_blocks
from ckpt.records import CommitRecord
from ckpt.repository import Repository, commit_name
from ckpt.storage.base import Entry
from ckpt.storage.errors import CkptError, IntegrityError, NotFound
from ckpt.storage.words import count
from ckpt.tools.common import Advance, size

State = Literal["ok", "incomplete", "damaged", "unreadable", "unfinished"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: `incomplete` misses files, `damaged` has a bad record, `unreadable` can't be looked at now or by this version,
    `unfinished` was never committed."""

    step: int
    state: State
    commit: CommitRecord | None
    problems: tuple[str, ...] = ()
    bad_files: frozenset[str] = frozenset()
    """Files of the step that are missing or have another length."""

    @property
    def failed(self) -> bool:
        """Whether something that was committed is no longer whole. An unfinished step may be in the making."""
        return self.state in ("incomplete", "damaged", "unreadable")


@dataclass(frozen=True, slots=True)
class LeafReport:
    """One array of a step."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored_bytes: float
    """Its share of the bytes in the packs."""
    codecs: tuple[str, ...]
    """Configurations of the codecs of its blocks; none for blocks that are stored as they are."""
    written_in: tuple[int, ...]
    """Steps whose packs hold its blocks."""
    missing: bool
    """Whether a pack with one of its blocks is missing or has another length."""


def survey(repo: Repository, steps: Iterable[int]) -> list[StepReport]:
    """The condition of each step. Records are read before the listing, so that a save under way looks unfinished.

    Left out is a step that was deleted, and of which only blocks are there that others of these steps need.
    """
    found = [_record(repo, step) for step in steps]
    needed = {f.name for r in found if r.commit for f in _files(r.commit)}
    folders = {_folder(name) for name in needed} | {f"steps/{r.step}" for r in found}
    files = {e.name: e.nbytes for e in _listing(repo, folders)}
    left_over = {_folder(name) for name in files.keys() - needed}
    reports = []
    for report in found:
        if report.state == "unfinished" and needed and f"steps/{report.step}" not in left_over:
            continue
        report = _finished(report, files)
        if report.state == "incomplete" and _record(repo, report.step).state == "unfinished":
            continue  # deleted while we looked
        reports.append(report)
    return reports


def _record(repo: Repository, step: int) -> StepReport:
    name = commit_name(step)
    where = f"{repo.url}/{name}"
    try:
        commit = repo.record(step)
    except NotFound:
        return StepReport(step, "unfinished", None)
    except CkptError as error:
        return StepReport(step, failed_by(error), None, (str(error),))
    if commit.step != step:
        return StepReport(step, "damaged", None, (f"{where} is the record of step {commit.step}",))
    return StepReport(step, "ok", commit)


def failed_by(error: CkptError) -> State:
    """The state of a step that raises this."""
    return "damaged" if isinstance(error, IntegrityError) else "unreadable"


def _files(commit: CommitRecord) -> tuple[records.FileRecord, ...]:
    return commit.manifests + commit.trees + commit.packs


def _folder(name: str) -> str:
    return "/".join(name.split("/")[:2])


def _listing(repo: Repository, folders: set[str]) -> Iterator[Entry]:
    if len(folders) > 8:  # one walk; a handful of folders costs less than walking all steps
        yield from repo.store.list("steps")
        return
    for folder in folders:
        yield from repo.store.list(folder)


def _finished(report: StepReport, files: dict[str, int]) -> StepReport:
    if report.state == "unfinished":
        prefix = f"steps/{report.step}/"
        sizes = [nbytes for name, nbytes in files.items() if name.startswith(prefix)]
        holds = f"{count(len(sizes), 'file')}, {size(sum(sizes))}"
        problem = f"no commit record: the save is under way or was cut off ({holds})"
        return StepReport(report.step, "unfinished", None, (problem,))
    if report.commit is None:
        return report
    problems, bad = [], set()
    for file in _files(report.commit):
        nbytes = files.get(file.name)
        if nbytes != file.nbytes:
            bad.add(file.name)
            is_now = "is missing" if nbytes is None else f"has {nbytes:,} bytes instead of {file.nbytes:,}"
            problems.append(f"{file.name} {is_now}")
    return StepReport(report.step, "incomplete" if bad else "ok", report.commit, tuple(problems), frozenset(bad))


def leaf_reports(checkpoint: Checkpoint, bad_files: frozenset[str]) -> dict[str, LeafReport]:
    """Every array of a step by its leaf's name."""
    found = {}
    for name, rows in checkpoint.manifest().by_leaf().items():
        held = [r for r in rows if r.pack is not None]
        found[name] = LeafReport(
            name=name,
            dtype=rows[0].dtype,
            shape=rows[0].global_shape,
            nbytes=sum(r.nbytes for r in rows),
            stored_bytes=sum(r.stored * r.nbytes / r.raw for r in held if r.raw),
            codecs=tuple(sorted({r.codec for r in held if r.codec is not None})),
            written_in=tuple(sorted({_step_of(r) for r in held})),
            missing=any(r.pack in bad_files for r in held),
        )
    return found


def _step_of(row: Row) -> int:
    return int((row.pack or "").split("/")[1])


def blocks_of(checkpoint: Checkpoint, leaves: Iterable[str] | None = None) -> Manifest:
    """The manifest, or the part of it that these leaves need."""
    manifest = checkpoint.manifest()
    if leaves is None:
        return manifest
    return manifest.select(leaves)


def stored_bytes(manifest: Manifest) -> int:
    """Bytes that `verify` reads."""
    return manifest.stored_bytes()


def verify(checkpoint: Checkpoint, manifest: Manifest, advance: Advance) -> int:
    """Read and check every block of `manifest`; return their bytes, or raise IntegrityError with leaf and file."""
    return verify_blocks(checkpoint.store, manifest, checkpoint.where, advance)
