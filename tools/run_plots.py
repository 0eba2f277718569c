"""Draws plots: how a run spent its time, and the results of a simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ckpt.recovery.goodput.ledger import LedgerSpan, goodput
from ckpt.recovery.goodput.simulator import IntervalOutcome
from ckpt.recovery.goodput.time_category import TIME_CATEGORIES, TimeCategory
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_facts import FailureSummary, StartFacts, facts_of
from ckpt.recovery.run_log.run_state import is_failure
from ckpt.storage.base.plural import format_count
from ckpt.tools.common import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Mapping[TimeCategory, str] = {
    "useful": "#0b7285", "redo": "#f08c00", "stall": "#ffd43b", "restore": "#4dabf7", "spawn": "#9775fa",
    "detect": "#e03131", "stop": "#868e96", "decide": "#343a40", "wait": "#ced4da",
}  # fmt: skip
MEANINGS: Mapping[TimeCategory, str] = {
    "useful": "steps done for the first time", "redo": "steps done again", "stall": "waiting for a save",
    "restore": "reading a checkpoint", "spawn": "starting processes", "detect": "failed, not yet noticed",
    "stop": "ending processes", "decide": "deciding", "wait": "waiting to start again",
}  # fmt: skip
TEXT_COLOUR, FAINT_COLOUR, FAILURE_COLOUR = "#343a40", "#868e96", "#c92a2a"

_SHARES_LEFT = 0.26
"""Where the bar of shares begins, to the right of the large number."""

_MAX_ROWS = 12
"""Up to this number, each attempt has a row of its own; more attempts share one row."""

_AFTER_FAILURE: frozenset[TimeCategory] = frozenset({"detect", "stop", "decide", "wait"})
"""How an attempt spends its time after it has failed."""


@dataclass(frozen=True, slots=True)
class _FailureMark:
    """A failure and its position on the axis of accounted seconds."""

    at: float
    attempt: int
    text: str


def draw_run(spans: Sequence[LedgerSpan], entries: Sequence[LogEntry], file: Path) -> None:
    """Draw a run into a PNG file: its progress, its attempts as coloured bars, and the shares of time. Needs matplotlib.

    spans: those of the goodput ledger. entries: those of the run log.
    """
    plt = _pyplot()
    fig = figure_of_run(plt, spans, entries)
    fig.savefig(file, dpi=150, format="png")
    plt.close(fig)


def figure_of_run(plt: Any, spans: Sequence[LedgerSpan], entries: Sequence[LogEntry]) -> Any:
    """Return the figure that `draw_run` draws. plt: matplotlib.pyplot."""
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.name] += span.seconds
    starts = _span_starts(spans)
    marks = _failure_marks(spans, starts, entries)
    attempts = sorted({span.attempt for span in spans})
    one_row = len(attempts) > _MAX_ROWS
    has_steps = any(span.step >= 0 for span in spans)
    heights = [1.3, *([2.6] if has_steps else []), 0.55 + (0.7 if one_row else 0.34 * len(attempts))]
    fig, axes = plt.subplots(
        len(heights), 1, figsize=(12, sum(heights) + 1.1), height_ratios=heights, layout="constrained", squeeze=False
    )
    above, *middle, below = axes[:, 0]
    _draw_shares(above, seconds, sum(map(is_failure, entries)))
    unit, scale = _time_unit(sum(seconds.values()))
    if middle:
        middle[0].sharex(below)
        _draw_progress(middle[0], spans, starts, marks, scale)
    _draw_attempts(below, spans, starts, marks, attempts, scale, one_row)
    below.set_xlim(0, max(sum(seconds.values()) / scale, 1e-9))
    below.set_xlabel(unit, fontsize=9, color=FAINT_COLOUR, loc="right")
    fig.suptitle(_title(entries), fontsize=11, color=TEXT_COLOUR, x=0.01, ha="left", family="monospace", parse_math=False)
    return fig


def draw_intervals(points: Sequence[IntervalOutcome], title: str, file: Path) -> None:
    """Draw goodput by the interval between saves into a PNG file, with the spread over the seeds. Needs matplotlib.

    Daly's interval is marked.
    """
    plt = _pyplot()
    fig, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=[3, 2], layout="constrained")
    x = [point.interval_seconds for point in points]
    mean = [100 * point.goodput for point in points]
    least, most = ([100 * end(point.goodputs) for point in points] for end in (min, max))
    above.fill_between(x, least, most, color=COLOURS["useful"], alpha=0.15, linewidth=0, label="all seeds")
    above.plot(x, mean, "o-", color=COLOURS["useful"], markersize=4, label="mean")
    for point in points:
        if point.daly:
            above.axvline(point.interval_seconds, color=FAILURE_COLOUR, linewidth=1.1, linestyle=(0, (4, 3)))
            below.axvline(point.interval_seconds, color=FAILURE_COLOUR, linewidth=1.1, linestyle=(0, (4, 3)))
            above.annotate(
                f'Daly, every="auto": {_format_duration(point.interval_seconds)}',
                (point.interval_seconds, 1),
                (0, 3),
                ha="center",
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=FAILURE_COLOUR,
                fontsize=9,
            )
    names: list[TimeCategory] = [
        name for name in TIME_CATEGORIES if name != "useful" and any(p.mean(name) > 5e-4 for p in points)
    ]
    if names:
        below.stackplot(
            x, [[100 * p.mean(name) for p in points] for name in names], colors=[COLOURS[name] for name in names],
            labels=[f"{name}: {MEANINGS[name]}" for name in names],
        )  # fmt: skip
    above.set_xscale("log")
    ticks = [point.interval_seconds for point in points][:: 1 if len(points) <= 8 else 2]
    below.set_xticks(ticks, [_format_duration(tick) for tick in ticks])
    below.set_xticks([], minor=True)
    below.set_xlim(min(x), max(x))
    above.set_ylabel("goodput, % of the time", color=TEXT_COLOUR, fontsize=9)
    below.set_ylabel("the rest, % of the time", color=TEXT_COLOUR, fontsize=9)
    below.set_xlabel("between two saves", color=FAINT_COLOUR, fontsize=9, loc="right")
    above.legend(loc="lower left", frameon=False, fontsize=9)
    handles, labels = below.get_legend_handles_labels()
    below.legend(handles[::-1], labels[::-1], loc="upper center", frameon=False, fontsize=8)
    for ax in (above, below):
        _style_axes(ax)
    fig.suptitle(title, fontsize=11, color=TEXT_COLOUR, x=0.01, ha="left")
    fig.savefig(file, dpi=150, format="png")
    plt.close(fig)


# --- the parts of the plot of a run ----------------------------------------------------------------------------


def _draw_shares(ax: Axes, seconds: Mapping[str, float], failures: int) -> None:
    """Draw the shares of time as one bar, and the goodput as a large number."""
    total = sum(seconds.values()) or 1.0
    ax.set_axis_off()
    ax.set_xlim(0, 1)
    ax.set_ylim(-1.5, 1)
    ax.text(0, 0.1, f"{100 * goodput(seconds):.1f} %", fontsize=30, weight="bold", color=COLOURS["useful"], va="center")
    count = f"{failures} failure{'' if failures == 1 else 's'}"
    ax.text(0, -1.0, f"useful, of {_format_duration(total)} · {count}", fontsize=10, color=TEXT_COLOUR, va="center")
    at, bars = _SHARES_LEFT, []
    for name in (name for name in TIME_CATEGORIES if seconds.get(name, 0.0) >= 0.005):
        part = (1 - _SHARES_LEFT) * seconds[name] / total
        label = f"{name} {_format_duration(seconds[name])}"
        bars.append(ax.barh(0.1, part, left=at, height=1.1, color=COLOURS[name], label=label))
        at += part
    legend = ax.legend(
        handles=bars,
        loc="upper left",
        bbox_to_anchor=(_SHARES_LEFT, 0.3),
        ncols=5,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        fontsize=9,
        labelcolor=TEXT_COLOUR,
        handlelength=0.8,
        handleheight=0.8,
        columnspacing=2.5,
    )
    legend.set_in_layout(False)


def _draw_progress(
    ax: Axes, spans: Sequence[LedgerSpan], starts: Sequence[float], marks: Sequence[_FailureMark], scale: float
) -> None:
    """Draw the step over time, with a line for each attempt, and the last committed step."""
    done: dict[int, list[tuple[float, int]]] = defaultdict(list)
    saved: list[tuple[float, int]] = []
    for start, span in zip(starts, spans, strict=True):
        at = (start + span.seconds) / scale
        if span.step >= 0 and span.name in ("useful", "redo", "stall"):
            done[span.attempt].append((at, span.step))
        if span.committed > (saved[-1][1] if saved else -1):
            saved.append((at, span.committed))
    for number, points in enumerate(done.values()):
        ax.plot(*zip(*points, strict=True), color=COLOURS["useful"], linewidth=1.6, label=None if number else "step")
    if saved:
        end = (starts[-1] + spans[-1].seconds) / scale
        ax.step(
            *zip(*saved, (end, saved[-1][1]), strict=True),
            where="post",
            color=TEXT_COLOUR,
            linewidth=0.9,
            linestyle=(0, (1, 1.5)),
            label="committed",
        )
    for mark in marks:
        ax.axvline(mark.at / scale, color=FAILURE_COLOUR, linewidth=0.8, alpha=0.6)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("step", color=TEXT_COLOUR, fontsize=9)
    ax.legend(loc="upper left", frameon=False, fontsize=9)
    ax.tick_params(labelbottom=False)
    _style_axes(ax)


def _draw_attempts(
    ax: Axes,
    spans: Sequence[LedgerSpan],
    starts: Sequence[float],
    marks: Sequence[_FailureMark],
    attempts: Sequence[int],
    scale: float,
    one_row: bool,
) -> None:
    """Draw the attempts as bars, coloured by how they spent their time, and each failure with its cause."""
    row = dict.fromkeys(attempts, 0) if one_row else {attempt: number for number, attempt in enumerate(attempts)}
    bars: dict[tuple[int, TimeCategory], list[tuple[float, float]]] = defaultdict(list)
    for start, span in zip(starts, spans, strict=True):
        bars[row[span.attempt], span.name].append((start / scale, span.seconds / scale))
    for (number, name), ranges in bars.items():
        ax.broken_barh(ranges, (number - 0.38, 0.76), color=COLOURS[name], linewidth=0)
    total = (starts[-1] + spans[-1].seconds) / scale if spans else 1.0
    for mark in marks:
        at, number = mark.at / scale, row[mark.attempt]
        ax.plot([at, at], [number - 0.46, number + 0.46], color=FAILURE_COLOUR, linewidth=1.4, clip_on=False)
        if one_row:
            continue
        ends = [start + span.seconds for start, span in zip(starts, spans, strict=True) if span.attempt == mark.attempt]
        end = max(ends) / scale
        fits_right = end < 0.62 * total  # otherwise the text is to the left of the bar
        begin = min(start for start, span in zip(starts, spans, strict=True) if span.attempt == mark.attempt) / scale
        ax.annotate(
            mark.text,
            (end if fits_right else begin, number),
            (6 if fits_right else -6, 0),
            textcoords="offset points",
            va="center",
            ha="left" if fits_right else "right",
            fontsize=8.5,
            color=FAILURE_COLOUR,
            parse_math=False,  # the message of an error may have any characters, also `$`
        )
    ax.set_ylim(max(row.values(), default=0) + 0.6, -0.6)
    ax.set_yticks([] if one_row else list(row.values()), [] if one_row else [f"attempt {a}" for a in row])
    _style_axes(ax)
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0, labelsize=9, colors=TEXT_COLOUR)
    if one_row:
        ax.set_ylabel(f"{len(attempts)}\nattempts", rotation=0, ha="right", va="center", fontsize=9, color=TEXT_COLOUR)


# --- positions, texts and style --------------------------------------------------------------------------------


def _span_starts(spans: Sequence[LedgerSpan]) -> list[float]:
    """Return where each span begins, in accounted seconds: the time between two runs in one folder is left out."""
    found, at = [], 0.0
    for span in spans:
        found.append(at)
        at += span.seconds
    return found


def _failure_marks(spans: Sequence[LedgerSpan], starts: Sequence[float], entries: Sequence[LogEntry]) -> list[_FailureMark]:
    """Return the marks of the failures. A failure is logged while its attempt is stopped, so it is moved to before that.

    Its attempt shows where it belongs, as the clock of the entries may have been set meanwhile. The time only decides between
    the attempts of two jobs that have the same number.
    """
    last_spans: dict[int, list[int]] = defaultdict(list)
    for number, span in enumerate(spans):
        if number + 1 == len(spans) or spans[number + 1].attempt != span.attempt:
            last_spans[span.attempt].append(number)
    found = []
    for entry in filter(is_failure, entries):
        if entry.attempt not in last_spans:
            continue
        at = min((abs(spans[number].at - entry.at), number) for number in last_spans[entry.attempt])[1]
        while at > 0 and spans[at].name in _AFTER_FAILURE and spans[at - 1].attempt == entry.attempt:
            at -= 1
        exact = starts[at] + (spans[at].seconds if spans[at].name not in _AFTER_FAILURE else 0.0)
        found.append(_FailureMark(exact, entry.attempt, _describe_cause(entry)))
    return found


def _describe_cause(entry: LogEntry) -> str:
    failure = facts_of(entry, FailureSummary)
    ranks = failure.ranks
    who = f"rank {ranks[0]}" if len(ranks) == 1 else format_count(len(ranks), "rank") if ranks else f"host {failure.host}"
    text = printable(entry.text.partition(";")[0])
    return f"{who} {text if len(text) <= 60 else text[:59] + '…'}"


def _title(entries: Sequence[LogEntry]) -> str:
    start = next((facts_of(entry, StartFacts) for entry in entries if entry.kind == "start"), None)
    command, ranks = ((), 0) if start is None else (start.command, start.ranks)
    words = [PurePath(word).name if word.startswith("/") else word for word in command]
    text = f"{format_count(ranks, 'rank')}: {printable(' '.join(words))}"
    return text if len(text) <= 120 else text[:119] + "…"


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds > 4 * size:
            return unit, size
    return "seconds", 1.0


def _format_duration(seconds: float) -> str:
    """Return a duration as text, such as 1.2 s, 3.4 min or 5.6 h."""
    unit, size = next(((u, s) for u, s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)) if seconds >= 2 * s), ("s", 1.0))
    value = seconds / size
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}" if value >= 0.1 else f"{value:.2f} {unit}"


def _style_axes(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#ced4da")
    ax.tick_params(labelsize=8, colors=FAINT_COLOUR)
    ax.grid(axis="y", color="#e9ecef", linewidth=0.7)
    ax.set_axisbelow(True)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
