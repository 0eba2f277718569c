"""How ckpt-inspect shows steps and their arrays: tables, verdicts and JSON."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime

import click

from ckpt.format.training_lines import StepOrder
from ckpt.groups.base import ranks_text
from ckpt.repository.repository import Repository
from ckpt.storage.base.plural import format_count
from ckpt.tools import common
from ckpt.tools.codec_choice_display import choice_json, describe_choice, describe_codec, describe_differences
from ckpt.tools.common import emit, format_size, printable
from ckpt.tools.step_contents import Contents
from ckpt.tools.step_health import LeafReport, StepReport, StepState

_COLOURS: dict[StepState, str] = {
    "ok": "green", "unfinished": "yellow", "incomplete": "red", "damaged": "red", "unreadable": "red",
}  # fmt: skip


# --- all steps -------------------------------------------------------------------------------------------------


def sort_by_age(repo: Repository, reports: list[StepReport]) -> tuple[list[StepReport], StepOrder]:
    """Return the steps in the order in which they were saved, the newest last and uncommitted ones after it."""
    order = repo.order_of(
        {r.step: r.commit.training_line for r in reports if r.commit is not None},
        [r.step for r in reports if r.commit is None and r.state != "unfinished"],
    )
    age = {step: at for at, step in enumerate(order.steps)}
    by_age = sorted(reports, key=lambda r: (age.get(r.step, len(age)), r.step)) if order.newest_line.number else reports
    return by_age, order


def show_steps(reports: list[StepReport], order: StepOrder) -> None:
    """Print a table of steps, in their order."""
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


def show_problems(report: StepReport, most: int = 10) -> None:
    """Print the problems of a step, `most` of them at most."""
    for problem in report.problems[:most]:
        emit(f"step {report.step}: {printable(problem)}")
    if len(report.problems) > most:
        emit(f"step {report.step}: … and {len(report.problems) - most} more files")


def format_verdict(report: StepReport, details: str) -> str:
    """Return a line about a step that was verified."""
    verdict = "OK" if report.state == "ok" else report.state.upper()
    return f"step {report.step}  {_style_state(report.state, verdict)}  {printable(details)}"


# --- one step --------------------------------------------------------------------------------------------------


def show_step(repo: Repository, report: StepReport, chosen: Contents | None, leaves: list[LeafReport]) -> None:
    """Print a step with its arrays. chosen: None if its manifest can't be read."""
    if chosen is not None:
        _show_leaves(leaves)
        for second, first in chosen.tied.items():
            emit(f"{printable(second)} is tied to {printable(first)}")
        _show_own_ranks(chosen.own_ranks)
        stored = sum(leaf.stored_bytes for leaf in leaves)
        if report.commit is not None:
            for line in (
                *map(describe_choice, report.commit.codec_choices),
                *map(describe_differences, report.commit.difference_choices),
            ):
                emit(printable(line))
        emit(
            f"{format_count(len(leaves), 'leaf')}, {format_size(chosen.nbytes)} stored in {format_size(stored)}, "
            f"and {format_count(len(chosen.values), 'plain value')}"
        )
    about = f"step {report.step} of {repo.url}: {report.state}"
    if (commit := report.commit) is not None:
        who = f"{format_count(commit.world_size, 'rank')} of generation {commit.generation}, ckpt {commit.version}"
        about += f"; saved {_format_time(commit.created)} UTC by {who}"
    emit(about)
    show_problems(report)


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


# --- JSON ------------------------------------------------------------------------------------------------------


def step_json(repo: Repository, report: StepReport, order: StepOrder | None, verifying: bool) -> dict[str, object]:
    """Return what the JSON document says about a step. order: of all steps; None if only one is shown."""
    result: dict[str, object] = {"step": report.step, "state": report.state, "problems": list(report.problems)}
    if verifying:
        result["verified"] = report.state == "ok"
    if report.commit is not None:
        names = ("created", "generation", "world_size", "leaves", "raw_bytes", "written_bytes", "version", "line")
        result |= {name: getattr(report.commit, name) for name in names}
        if order is not None:
            result |= {"abandoned": report.step in order.abandoned, "set_aside": report.step in order.set_aside}
        result["codec_choices"] = [choice_json(choice) for choice in report.commit.codec_choices]
        result["difference_choices"] = [dataclasses.asdict(choice) for choice in report.commit.difference_choices]
        signature = report.commit.signature
        result["signature"] = None if signature is None else {"key": signature.key, "checked": bool(repo.keys)}
    return result


def leaf_json(leaf: LeafReport) -> dict[str, object]:
    """Return what the JSON document says about an array."""
    return {**dataclasses.asdict(leaf), "codecs": [json.loads(codec) for codec in leaf.codecs]}


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
