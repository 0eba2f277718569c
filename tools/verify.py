"""Verifies steps for `ckpt-inspect --verify`, all bytes or a part of the blocks, and gives the exit status of the check."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator

from ckpt.api import check_step
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.plural import format_count
from ckpt.tools import common, verify_subset
from ckpt.tools.common import emit, format_size
from ckpt.tools.step_display import format_verdict, show_problems, step_json
from ckpt.tools.step_health import StepReport, select_manifest, state_of_error, step_reports, stored_bytes, verify_manifest


def exit_status(reports: Iterable[StepReport]) -> int:
    """Return 1 if a committed step is damaged, incomplete or unreadable, else 0."""
    return int(any(report.has_failed for report in reports))


def verify_steps(repo: Repository, reports: list[StepReport], quiet: bool) -> Iterator[StepReport]:
    """Read and check steps; yield the report of each, and print its verdict unless `quiet`."""
    for report in reports:
        if report.commit is None:
            if not quiet:
                emit(format_verdict(report, "; ".join(report.problems)))
            yield report
        else:
            yield verify_step(repo, report, None, quiet)


def verify_step(repo: Repository, report: StepReport, leaves: list[str] | None, quiet: bool) -> StepReport:
    """Read and check a step; return its report with the errors that were found. leaves: None for all."""
    assert report.commit is not None
    checkpoint = repo.checkpoint(report.commit)
    began = time.monotonic()
    try:
        checkpoint.require_complete()
        manifest = select_manifest(checkpoint, leaves)
        with common.progress(stored_bytes(manifest), f"step {report.step}") as advance:
            nbytes = verify_manifest(checkpoint, manifest, advance)
    except CkptError as error:
        report = with_error(report, error)
        if not quiet:
            emit(format_verdict(report, str(error)))
    else:
        if not quiet:
            what = "" if leaves is None else f" of {format_count(len(leaves), 'leaf')}"
            summary = f"{format_size(nbytes)}{what} read and checked in {time.monotonic() - began:.1f} s"
            emit(format_verdict(report, "; ".join((summary, checkpoint.protection, *report.problems))))
    return report


def verify_next_part(repo: Repository, step: int | None, share: float, as_json: bool) -> int:
    """Check the next part of all blocks, or of the blocks of one step; return the exit status."""
    reports = {
        report.step: report for report in step_reports(repo, repo.step_numbers() if step is None else [check_step(step)])
    }
    if step is not None and (not reports or reports[step].state == "unfinished"):
        repo.commit(step)  # raises StepNotFound, which names the existing steps
    checkpoints = (repo.checkpoint(report.commit) for report in reports.values() if report.commit is not None)
    blocks, failed = verify_subset.collect_blocks(checkpoints)
    for number, error in failed.items():
        reports[number] = with_error(reports[number], error)
    position = verify_subset.VerifyProgress(repo, step)
    chosen = verify_subset.choose_part(blocks, position.last() or verify_subset.random_position(blocks), share)
    nbytes, total = (sum(blocks[pack_position].row.stored for pack_position in part) for part in (chosen, blocks))
    with common.progress(nbytes, f"{100 * share:g}% of the blocks") as advance:
        for number, errors in verify_subset.verify_chosen(repo, blocks, chosen, advance).items():
            for bad in errors:
                reports[number] = with_error(reports[number], bad)
    if chosen:
        try:
            position.remember(chosen[-1])
        except OSError as error:
            common.print_error(
                "ckpt-inspect",
                f"can't write {position.file or 'the position'} ({error}), so the next run begins at a random block; name a "
                "writable folder in XDG_STATE_HOME",
            )
    bad_steps = [report for report in reports.values() if report.has_failed]
    if as_json:
        subset = {"read_bytes": nbytes, "of_bytes": total, "blocks": len(chosen), "of_blocks": len(blocks)}
        steps = [step_json(repo, report, None, False) for report in reports.values()]
        common.emit_json({"url": repo.url, "ok": not bad_steps, "subset": subset, "steps": steps})
        return exit_status(bad_steps)
    for report in bad_steps:
        show_problems(report)
    emit(
        f"{format_size(nbytes)} of {format_size(total)} read and checked, in {len(chosen):,} of "
        f"{format_count(len(blocks), 'block')} of {format_count(len(reports), 'step')}"
        + (f", {len(bad_steps)} of them not ok" if bad_steps else "")
    )
    return exit_status(bad_steps)


def with_error(report: StepReport, error: CkptError) -> StepReport:
    """Return the report with one more problem, and the state that follows from it."""
    return dataclasses.replace(report, state=state_of_error(error), problems=(*report.problems, str(error)))
