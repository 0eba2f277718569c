"""Renders the metrics of a run in Prometheus' text format, and serves them over HTTP."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ckpt.recovery.goodput.ledger import goodput
from ckpt.recovery.goodput.time_category import TIME_CATEGORIES
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_facts import DecisionFacts, FailureSummary, NoteFacts, facts_of
from ckpt.recovery.run_log.run_state import is_failure
from ckpt.storage.base.http_pages import HttpPage, HttpPages
from ckpt.training.heartbeat_records import RankHeartbeat

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    kind: str
    """counter or gauge."""
    help: str
    samples: Sequence[tuple[_Labels, float]]


def render_metrics(
    entries: Sequence[LogEntry],
    seconds: Mapping[str, float],
    is_up: bool,
    heartbeats: Mapping[int, RankHeartbeat] = MappingProxyType({}),
    now: float = 0.0,
    used_bytes: int = 0,
) -> str:
    """Return all metrics of a run. Pure.

    entries: the entries of the run log, in order.
    seconds: the seconds of each category, from the goodput ledger.
    is_up: whether the run is under way.
    heartbeats: the heartbeats of the running ranks, by rank.
    now: the time by the clock of their `since` (CLOCK_MONOTONIC).
    used_bytes: the bytes of memory that saved steps take on this host.
    """
    help_text = "Bytes of memory that saved steps take on this host."
    memory = _Family("ckpt_run_memory_bytes", "gauge", help_text, [({}, used_bytes)] if used_bytes else [])
    families = [*_entry_families(entries, is_up), *_ledger_families(seconds), *_rank_families(heartbeats, now), memory]
    lines = []
    for family in families:
        if family.samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_format_labels(labels)} {value!r}" for labels, value in family.samples]
    return "\n".join(lines) + "\n"


def serve(host: str, port: int, render: Callable[[], str]) -> HttpPages:
    """Serve the result of `render` at /metrics, and /healthz, until the returned server is closed.

    port: 0 means any free port. The `port` of the returned server is the one in use.
    render: called from the threads of the server.

    Raises OSError if the address can't be listened on.
    """
    pages = {"/metrics": lambda: HttpPage(render().encode(), CONTENT_TYPE), "/healthz": lambda: HttpPage(b"running\n")}
    return HttpPages(host, port, pages, "ckpt-run-metrics")


def _entry_families(entries: Sequence[LogEntry], is_up: bool) -> list[_Family]:
    failures = Counter(facts_of(e, FailureSummary).cause for e in entries if is_failure(e))
    decisions = Counter(str(facts_of(e, DecisionFacts).action) for e in entries if e.kind == "decision")
    return [
        _Family("ckpt_run_up", "gauge", "Whether the run is under way.", [({}, int(is_up))]),
        _Family("ckpt_run_attempt", "gauge", "The current or last attempt.", _attempt_samples(entries)),
        _Family("ckpt_run_failures_total", "counter", "Failures of ranks, by cause.", _labelled_samples("cause", failures)),
        _Family(
            "ckpt_run_decisions_total",
            "counter",
            "Decisions at the end of an attempt, by action.",
            _labelled_samples("action", decisions),
        ),
        _Family(
            "ckpt_run_straggler_ratio",
            "gauge",
            "Step time of a slow rank, relative to the median.",
            _straggler_samples(entries),
        ),
    ]


def _straggler_samples(entries: Sequence[LogEntry]) -> list[tuple[_Labels, float]]:
    """Return the stragglers of the current attempt."""
    last = _last_attempt(entries)
    notes = [facts_of(e, NoteFacts) for e in entries if e.kind == "note" and e.attempt == last]
    return [
        ({"rank": str(note.straggler), "host": note.host}, note.times)
        for note in notes
        if note.straggler is not None and note.host is not None and note.times is not None
    ]


def _attempt_samples(entries: Sequence[LogEntry]) -> list[tuple[_Labels, float]]:
    return [({}, _last_attempt(entries))] if entries else []


def _last_attempt(entries: Sequence[LogEntry]) -> int:
    """Return the number of the current or last attempt. Notes that replace unreadable entries have attempt 0."""
    return max((entry.attempt for entry in entries), default=0)


def _ledger_families(seconds: Mapping[str, float]) -> list[_Family]:
    if not any(seconds.values()):  # a host that never led the run has no ledger, and a goodput of 0 would be wrong
        return []
    spent: dict[str, float] = {name: seconds.get(name, 0.0) for name in TIME_CATEGORIES}
    return [
        _Family("ckpt_run_seconds_total", "counter", "Wall time, by category.", _labelled_samples("name", spent)),
        _Family("ckpt_run_goodput_ratio", "gauge", "The useful share of the wall time.", [({}, goodput(seconds))]),
    ]


def _rank_families(heartbeats: Mapping[int, RankHeartbeat], now: float) -> list[_Family]:
    beating = {rank: beat for rank, beat in sorted(heartbeats.items()) if beat.beats}
    if not beating:
        return []
    first = next(iter(beating.values()))
    return [
        _Family(
            "ckpt_run_step",
            "gauge",
            "The newest step that all ranks have done; -1 none.",
            [({}, min(beat.step for beat in beating.values()))],
        ),
        _Family(
            "ckpt_run_committed_step",
            "gauge",
            "The newest committed step; -1 none.",
            [({}, max(beat.committed for beat in beating.values()))],
        ),
        _Family(
            "ckpt_run_loss",
            "gauge",
            "The loss that the first rank passed to step().",
            [] if math.isnan(first.loss) else [({}, first.loss)],
        ),
        _Family(
            "ckpt_run_rank_step",
            "gauge",
            "The last step that the rank has done; -1 none.",
            _labelled_samples("rank", {k: b.step for k, b in beating.items()}),
        ),
        _Family(
            "ckpt_run_rank_silent_seconds",
            "gauge",
            "Seconds since the last heartbeat of the rank.",
            _labelled_samples("rank", {k: max(0.0, now - b.since) for k, b in beating.items()}),
        ),
        _Family(
            "ckpt_run_rank_compute_seconds_total",
            "counter",
            "Seconds that the rank marked by ckpt.pulse.compute.",
            _labelled_samples("rank", {k: b.compute_seconds for k, b in beating.items() if b.compute_seconds}),
        ),
    ]


def _labelled_samples(label: str, values: Mapping[str, float] | Mapping[int, float]) -> list[tuple[_Labels, float]]:
    return [({label: str(key)}, value) for key, value in values.items()]


def _format_labels(labels: _Labels) -> str:
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}" if labels else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
