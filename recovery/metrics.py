"""The record, the ledger and the beats of a run in Prometheus' text format, and a place to scrape it from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ckpt.pulse import Beat
from ckpt.recovery.course import is_failure
from ckpt.recovery.ledger import NAMES, goodput
from ckpt.recovery.state import Entry
from ckpt.storage.web import Page, Web

KIND = "text/plain; version=0.0.4; charset=utf-8"

_Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    kind: str
    """counter, gauge."""
    help: str
    samples: Sequence[tuple[_Labels, float]]


def text(
    entries: Sequence[Entry],
    seconds: Mapping[str, float],
    up: bool,
    beats: Mapping[int, Beat] = MappingProxyType({}),
    now: float = 0.0,
    held_bytes: int = 0,
) -> str:
    """All metrics of a run. Pure.

    entries: its record, in order. seconds: by name, of its ledger. up: it runs. beats: of the ranks that run, by their number,
    with `now` by the clock of their `since` (CLOCK_MONOTONIC). held_bytes: what steps take of the memory of this host.
    """
    held = "What steps take of the memory of this host."
    memory = _Family("ckpt_run_memory_bytes", "gauge", held, [({}, held_bytes)] if held_bytes else [])
    families = [*_of_record(entries, up), *_of_ledger(seconds), *_of_ranks(beats, now), memory]
    lines = []
    for family in families:
        if family.samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_labels(labels)} {value!r}" for labels, value in family.samples]
    return "\n".join(lines) + "\n"


def serve(host: str, port: int, text: Callable[[], str]) -> Web:
    """Answer /metrics with what `text` gives, and /healthz, until the result is closed; its `port` is the port in use.

    `text` is called from other threads. Raises OSError where the port is taken.
    """
    pages = {"/metrics": lambda: Page(text().encode(), KIND), "/healthz": lambda: Page(b"running\n")}
    return Web(host, port, pages, "ckpt-run-metrics")


def _of_record(entries: Sequence[Entry], up: bool) -> list[_Family]:
    failures = Counter(str(e.facts["cause"]) for e in entries if is_failure(e))
    decisions = Counter(str(e.facts["action"]) for e in entries if e.kind == "decision")
    return [
        _Family("ckpt_run_up", "gauge", "Whether it runs.", [({}, int(up))]),
        _Family("ckpt_run_attempt", "gauge", "The attempt under way, or the last one.", _last(entries)),
        _Family("ckpt_run_failures_total", "counter", "Failures of ranks, by cause.", _by("cause", failures)),
        _Family("ckpt_run_decisions_total", "counter", "What was decided at the end of an attempt.", _by("action", decisions)),
        _Family("ckpt_run_straggler_ratio", "gauge", "Of slow ranks: times as long as the median.", _slow(entries)),
    ]


def _slow(entries: Sequence[Entry]) -> list[tuple[_Labels, float]]:
    """Those of the attempt under way."""
    found = [e.facts for e in entries if e.kind == "note" and "straggler" in e.facts and e.attempt == _attempt(entries)]
    return [({"rank": str(facts["straggler"]), "host": facts["host"]}, facts["times"]) for facts in found]


def _last(entries: Sequence[Entry]) -> list[tuple[_Labels, float]]:
    return [({}, _attempt(entries))] if entries else []


def _attempt(entries: Sequence[Entry]) -> int:
    """The attempt under way, or the last one. What was passed over in the log says none."""
    return max((entry.attempt for entry in entries), default=0)


def _of_ledger(seconds: Mapping[str, float]) -> list[_Family]:
    spent: dict[str, float] = {name: seconds.get(name, 0.0) for name in NAMES}
    return [
        _Family("ckpt_run_seconds_total", "counter", "Wall time, by what it was spent on.", _by("name", spent)),
        _Family("ckpt_run_goodput_ratio", "gauge", "The share of the time that was useful.", [({}, goodput(seconds))]),
    ]


def _of_ranks(beats: Mapping[int, Beat], now: float) -> list[_Family]:
    heard = {rank: beat for rank, beat in sorted(beats.items()) if beat.beats}
    if not heard:
        return []
    first = next(iter(heard.values()))
    return [
        _Family(
            "ckpt_run_step", "gauge", "The newest step that all ranks have done; -1 none.",
            [({}, min(beat.step for beat in heard.values()))],
        ),
        _Family(
            "ckpt_run_committed_step", "gauge", "The newest committed step; -1 none.",
            [({}, max(beat.committed for beat in heard.values()))],
        ),
        _Family(
            "ckpt_run_loss", "gauge", "As the first rank gave it to step().",
            [] if math.isnan(first.loss) else [({}, first.loss)],
        ),
        _Family("ckpt_run_rank_step", "gauge", "Done last; -1 none.", _by("rank", {k: b.step for k, b in heard.items()})),
        _Family(
            "ckpt_run_rank_silent_seconds", "gauge", "Since the rank said something.",
            _by("rank", {k: max(0.0, now - b.since) for k, b in heard.items()}),
        ),
        _Family(
            "ckpt_run_rank_compute_seconds_total", "counter", "In what was marked by ckpt.pulse.compute.",
            _by("rank", {k: b.compute_seconds for k, b in heard.items() if b.compute_seconds}),
        ),
    ]  # fmt: skip


def _by(label: str, values: Mapping[str, float] | Mapping[int, float]) -> list[tuple[_Labels, float]]:
    return [({label: str(key)}, value) for key, value in values.items()]


def _labels(labels: _Labels) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
