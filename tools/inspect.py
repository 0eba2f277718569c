"""The command ckpt-inspect: lists the steps of a repository or the arrays of a step, and verifies them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click

import ckpt
from ckpt.api import check_step
from ckpt.format.training_lines import StepOrder, order_steps
from ckpt.groups.base import ranks_text
from ckpt.repository.repository import Repository
from ckpt.state.rank_tree import own_name
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.plural import format_count
from ckpt.tools import common, verify_subset
from ckpt.tools.codec_choices import choice_json, describe_choice, describe_codec
from ckpt.tools.common import emit, format_size, printable
from ckpt.tools.step_contents import Contents, read_contents
from ckpt.tools.step_health import (
    LeafReport,
    StepReport,
    StepState,
    report_leaves,
    select_manifest,
    state_of_error,
    step_reports,
    stored_bytes,
    verify_manifest,
)

_COLOURS: dict[StepState, str] = {
    "ok": "green", "unfinished": "yellow", "incomplete": "red", "damaged": "red", "unreadable": "red",
}  # fmt: skip


@click.command(
    "ckpt-inspect",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  ckpt-inspect runs/a                      all steps of the repository in the folder runs/a
  ckpt-inspect s3://bucket/run 1000        every array of step 1000
  ckpt-inspect runs/a 1000 --only 'model.*'
  ckpt-inspect runs/a --verify             read every byte of every step and check it
  ckpt-inspect runs/a --verify --subset 5% read a twentieth, the next one each time
  ckpt-inspect runs/a --json | jq '.steps[-1].step'

\b
State of a step:
  ok          committed, and all its files exist with the right length
  incomplete  committed, but files are missing or have another length
  damaged     a record or (found with --verify) data differs from what was written
  unreadable  its files can't be read now (permission, network), or a newer version wrote them
  unfinished  no commit record: a save is running, or was interrupted


After a roll-back the steps are shown in the order in which they were saved, with their line of training:
  abandoned   saved after the step that the roll-back restored; `keep` deletes it first
  set aside   of an earlier run, which this one did not restore; `keep` does not delete it

Exit status: 0 all committed steps are good, 1 one is damaged or can't be read, 2 wrong usage.""",
)
@click.argument("url")
@click.argument("step", type=int, required=False)
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Only leaves of this name or shell pattern, such as 'model.*'. Needs STEP. May be repeated.",
)
@click.option(
    "--verify",
    "verifying",
    is_flag=True,
    help="Read all bytes of the STEP, or of all steps, and check them against their digests.",
)
@click.option(
    "--subset",
    "share",
    type=verify_subset.Percent(),
    metavar="N%",
    help="With --verify: read about this share of the stored bytes, from where the last such run ended. The position is stored "
    "in $XDG_STATE_HOME/ckpt (~/.local/state/ckpt).",
)
@common.key_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.version_option(ckpt.__version__, package_name="ckpt-store")
def command(
    url: str, step: int | None, only: tuple[str, ...], verifying: bool, share: float | None, key_file: str | None, as_json: bool
) -> int:
    """Show the steps of the checkpoint repository at URL, or the arrays of one STEP.

    URL is a folder, or any URL that ckpt.save accepts (s3://bucket/run …). Nothing is changed. Without --verify, only the small
    records are read and the files are listed, so this is fast even for large steps.
    """
    if step is None and only:
        raise click.UsageError("--only chooses leaves of one step: give the STEP, too")
    if share is not None and (only or not verifying):
        raise click.UsageError("--subset needs --verify, and can't be used with --only")
    repo = ckpt.open(url, key=key_file)
    if share is not None:
        return _verify_subset(repo, step, share, as_json)
    if step is None:
        return _inspect_all_steps(repo, verifying, as_json)
    (report,) = step_reports(repo, [check_step(step)]) or [StepReport(step, "unfinished", None)]
    if report.state == "unfinished" and step not in repo.step_numbers():
        repo.commit(step)  # raises StepNotFound, which names the existing steps
    return _inspect_one_step(repo, report, only, verifying, as_json)


def main() -> None:
    """Run the command as a console script."""
    common.run(command)


# --- all steps -------------------------------------------------------------------------------------------------


def _inspect_all_steps(repo: Repository, verifying: bool, as_json: bool) -> int:
    reports, order = _sort_by_age(step_reports(repo, repo.step_numbers()))
    if verifying:
        checked = list(_verify_steps(repo, reports, as_json))
        reports = [report for report, _ in checked]
    failed = sum(r.has_failed for r in reports)
    if as_json:
        common.emit_json({"url": repo.url, "ok": not failed, "steps": [_step_json(repo, r, order, verifying) for r in reports]})
        return int(bool(failed))
    if not verifying and reports:
        _show_steps(reports, order)
        for report in reports:
            _show_problems(report)
    emit(f"{format_count(len(reports), 'step')} in {repo.url}" + (f", {failed} of them not whole" if failed else ""))
    return int(bool(failed))


def _sort_by_age(reports: list[StepReport]) -> tuple[list[StepReport], StepOrder]:
    """Return the steps in the order in which they were saved, the newest last and uncommitted ones after it."""
    order = order_steps(
        {r.step: r.commit.training_line for r in reports if r.commit is not None},
        [r.step for r in reports if r.commit is None and r.state != "unfinished"],
    )
    age = {step: at for at, step in enumerate(order.steps)}
    by_age = sorted(reports, key=lambda r: (age.get(r.step, len(age)), r.step)) if order.newest_line.number else reports
    return by_age, order


def _show_steps(reports: list[StepReport], order: StepOrder) -> None:
    rows = []
    for report in reports:
        commit = report.commit
        cells = ["-"] * 6
        if commit is not None:
            cells = [
                _format_time(commit.created),
                f"{commit.leaves:,}",
                format_size(commit.raw_bytes),
                format_size(commit.written_bytes),
                _format_ratio(commit.written_bytes, commit.raw_bytes),
                str(commit.generation),
            ]
        rows.append([str(report.step), *cells, _style_state(report.state)])
        if order.newest_line.number:
            status = "abandoned" if report.step in order.abandoned else "set aside" if report.step in order.set_aside else ""
            rows[-1].append(f"{'-' if commit is None else commit.line} {status}".strip())
    columns = [">step", "created (UTC)", ">leaves", ">raw", ">written", ">ratio", ">generation", "state"]
    common.show_table(columns + ["line"] * (order.newest_line.number > 0), rows)


def _show_problems(report: StepReport, most: int = 10) -> None:
    for problem in report.problems[:most]:
        emit(f"step {report.step}: {printable(problem)}")
    if len(report.problems) > most:
        emit(f"step {report.step}: … and {len(report.problems) - most} more files")


def _step_json(repo: Repository, report: StepReport, order: StepOrder | None, verifying: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"step": report.step, "state": report.state, "problems": list(report.problems)}
    if verifying:
        result["verified"] = report.state == "ok"
    if report.commit is not None:
        names = ("created", "generation", "world_size", "leaves", "raw_bytes", "written_bytes", "version", "line")
        result |= {name: getattr(report.commit, name) for name in names}
        if order is not None:
            result |= {"abandoned": report.step in order.abandoned, "set_aside": report.step in order.set_aside}
        result["codec_choices"] = [choice_json(choice) for choice in report.commit.codec_choices]
        signature = report.commit.signature
        result["signature"] = None if signature is None else {"key": signature.key, "checked": bool(repo.keys)}
    return result


# --- one step --------------------------------------------------------------------------------------------------


def _inspect_one_step(repo: Repository, report: StepReport, only: tuple[str, ...], verifying: bool, as_json: bool) -> int:
    chosen: Contents | None = None
    leaves: list[LeafReport] = []
    if report.commit is not None:
        checkpoint = repo.checkpoint(report.commit)
        try:
            reports_by_leaf = report_leaves(checkpoint, report.bad_files)
            chosen = read_contents(checkpoint, only)
            leaves = [dataclasses.replace(reports_by_leaf[a.leaf], name=a.name) for a in chosen.arrays]
        except ckpt.IntegrityError as error:
            report = _with_error(report, error)
    if verifying and chosen is not None:
        own = [own_name(a.leaf, rank) for a in chosen.arrays for rank in chosen.own_ranks.get(a.name, ())]
        report, _ = _verify_step(repo, report, [*(a.leaf for a in chosen.arrays), *own] if only else None, as_json)
    if as_json:
        result = {"url": repo.url, **_step_json(repo, report, None, verifying)}
        if chosen is not None:
            result["leaves"] = [_leaf_json(leaf) for leaf in leaves]
            result |= {"plain_values": len(chosen.values), "tied": chosen.tied, "own_ranks": chosen.own_ranks}
        common.emit_json(result)
    elif not (verifying and chosen is not None):
        _show_step(repo, report, chosen, leaves)
    return int(report.state != "ok")


def _show_step(repo: Repository, report: StepReport, chosen: Contents | None, leaves: list[LeafReport]) -> None:
    if chosen is not None:
        _show_leaves(leaves)
        for second, first in chosen.tied.items():
            emit(f"{printable(second)} is tied to {printable(first)}")
        _show_own_ranks(chosen.own_ranks)
        stored = sum(leaf.stored_bytes for leaf in leaves)
        for choice in report.commit.codec_choices if report.commit is not None else ():
            emit(printable(describe_choice(choice)))
        emit(
            f"{format_count(len(leaves), 'leaf')}, {format_size(chosen.nbytes)} stored in {format_size(stored)}, "
            f"and {format_count(len(chosen.values), 'plain value')}"
        )
    about = f"step {report.step} of {repo.url}: {report.state}"
    if (commit := report.commit) is not None:
        who = f"{format_count(commit.world_size, 'rank')} of generation {commit.generation}, ckpt {commit.version}"
        about += f"; saved {_format_time(commit.created)} UTC by {who}"
    emit(about)
    _show_problems(report)


def _show_own_ranks(own_ranks: dict[str, list[int]], most: int = 3) -> None:
    """Print which ranks have saved other values than those listed."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, own in own_ranks.items():
        by_ranks.setdefault(tuple(own), []).append(printable(name))
    for ranks, names in by_ranks.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        emit(f"{ranks_text(ranks)} also saved other values of {', '.join(names[:most])}{more}; the values of rank 0 are listed")


def _show_leaves(leaves: list[LeafReport]) -> None:
    any_missing = any(leaf.missing for leaf in leaves)
    rows = [
        [
            printable(leaf.name), printable(leaf.dtype), "x".join(map(str, leaf.shape)) or "scalar", format_size(leaf.nbytes),
            _format_ratio(leaf.stored_bytes, leaf.nbytes), ", ".join(map(describe_codec, leaf.codecs)) or "none",
            _written_in(leaf),
            *([_style_state("incomplete", "file missing") if leaf.missing else ""] if any_missing else []),
        ]
        for leaf in leaves
    ]  # fmt: skip
    columns = ["name", "dtype", "shape", ">bytes", ">ratio", "codec", ">written in"]
    common.show_table(columns + ["state"] * any_missing, rows)


def _written_in(leaf: LeafReport) -> str:
    """Return the steps that wrote an array, and those that wrote the bases of its differences: `20 (base 10)`."""
    written = ", ".join(map(str, leaf.written_in)) or "-"
    return f"{written} (base {', '.join(map(str, leaf.bases_in))})" if leaf.bases_in else written


def _leaf_json(leaf: LeafReport) -> dict[str, Any]:
    return {**dataclasses.asdict(leaf), "codecs": [json.loads(codec) for codec in leaf.codecs]}


# --- verification ----------------------------------------------------------------------------------------------


def _verify_steps(repo: Repository, reports: list[StepReport], quiet: bool) -> Iterator[tuple[StepReport, int]]:
    for report in reports:
        if report.commit is None:
            if not quiet:
                emit(_format_verdict(report, "; ".join(report.problems)))
            yield report, 0
        else:
            yield _verify_step(repo, report, None, quiet)


def _verify_step(repo: Repository, report: StepReport, leaves: list[str] | None, quiet: bool) -> tuple[StepReport, int]:
    """Read and check a step; return its report with the errors that were found, and the number of bytes read."""
    assert report.commit is not None
    checkpoint = repo.checkpoint(report.commit)
    began = time.monotonic()
    nbytes = 0
    try:
        checkpoint.require_complete()
        manifest = select_manifest(checkpoint, leaves)
        with common.progress(stored_bytes(manifest), f"step {report.step}") as advance:
            nbytes = verify_manifest(checkpoint, manifest, advance)
    except CkptError as error:
        report = _with_error(report, error)
        if not quiet:
            emit(_format_verdict(report, str(error)))
    else:
        if not quiet:
            what = "" if leaves is None else f" of {format_count(len(leaves), 'leaf')}"
            summary = f"{format_size(nbytes)}{what} read and checked in {time.monotonic() - began:.1f} s"
            emit(_format_verdict(report, "; ".join((summary, checkpoint.protection, *report.problems))))
    return report, nbytes


def _verify_subset(repo: Repository, step: int | None, share: float, as_json: bool) -> int:
    """Check the next part of all blocks, or of the blocks of one step; return the exit status."""
    reports = {
        report.step: report for report in step_reports(repo, repo.step_numbers() if step is None else [check_step(step)])
    }
    if step is not None and (not reports or reports[step].state == "unfinished"):
        repo.commit(step)  # raises StepNotFound, which names the existing steps
    checkpoints = (repo.checkpoint(report.commit) for report in reports.values() if report.commit is not None)
    blocks, failed = verify_subset.collect_blocks(checkpoints)
    for number, error in failed.items():
        reports[number] = _with_error(reports[number], error)
    position = verify_subset.VerifyProgress(repo, step)
    chosen = verify_subset.choose_part(blocks, position.last() or verify_subset.random_position(blocks), share)
    nbytes, total = (sum(blocks[pack_position].row.stored for pack_position in part) for part in (chosen, blocks))
    with common.progress(nbytes, f"{100 * share:g}% of the blocks") as advance:
        for number, errors in verify_subset.verify_chosen(repo, blocks, chosen, advance).items():
            for bad in errors:
                reports[number] = _with_error(reports[number], bad)
    if chosen:
        try:
            position.remember(chosen[-1])
        except OSError as error:
            common.print_error(
                "ckpt-inspect", f"can't write {position.file}, so the next run begins at a random block: {error}"
            )
    bad_steps = [report for report in reports.values() if report.has_failed]
    if as_json:
        subset = {"read_bytes": nbytes, "of_bytes": total, "blocks": len(chosen), "of_blocks": len(blocks)}
        steps = [_step_json(repo, report, None, False) for report in reports.values()]
        common.emit_json({"url": repo.url, "ok": not bad_steps, "subset": subset, "steps": steps})
        return int(bool(bad_steps))
    for report in bad_steps:
        _show_problems(report)
    emit(
        f"{format_size(nbytes)} of {format_size(total)} read and checked, in {len(chosen):,} of "
        f"{format_count(len(blocks), 'block')} of {format_count(len(reports), 'step')}"
        + (f", {len(bad_steps)} of them not whole" if bad_steps else "")
    )
    return int(bool(bad_steps))


def _with_error(report: StepReport, error: CkptError) -> StepReport:
    return dataclasses.replace(report, state=state_of_error(error), problems=(*report.problems, str(error)))


def _format_verdict(report: StepReport, details: str) -> str:
    verdict = "OK" if report.state == "ok" else report.state.upper()
    return f"step {report.step}  {_style_state(report.state, verdict)}  {printable(details)}"


# --- texts -----------------------------------------------------------------------------------------------------


def _style_state(state: StepState, text: str = "") -> str:
    return click.style(text or state, fg=_COLOURS[state])


def _format_time(created: str) -> str:
    try:
        return datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return printable(created)


def _format_ratio(part: float, total: int) -> str:
    return f"{part / total:.2f}" if total else "-"


if __name__ == "__main__":
    main()
