"""The picture of a run shows each failure, in its attempt and with its text, whatever the text has and the clock does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.recovery.goodput.ledger import LedgerSpan
from ckpt.recovery.run_log.base import LogEntry

plt = pytest.importorskip("matplotlib.pyplot")

from ckpt.tools import run_plots  # noqa: E402

SPANS = [
    LedgerSpan(102.0, "spawn", 2.0, 0),
    LedgerSpan(130.0, "useful", 28.0, 0, 20),
    LedgerSpan(131.0, "stop", 1.0, 0, 20),
    LedgerSpan(140.0, "wait", 9.0, 0, 20),
    LedgerSpan(142.0, "spawn", 2.0, 1),
    LedgerSpan(160.0, "useful", 18.0, 1, 40),
]


def failure(text: str, at: float) -> LogEntry:
    return LogEntry(1, at, 0, "failure", text, {"ranks": [3], "cause": "exit"})


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(plt.Text) if text.get_text()]


@pytest.mark.parametrize("at", [130.5, 130.5 + 3600, 130.5 - 3600], ids=["steady", "set forward", "set back"])
def test_a_failure_is_shown_where_it_was_also_if_the_clock_was_set(at: float) -> None:
    figure = run_plots.figure_of_run(plt, SPANS, [failure("was killed by SIGKILL", at)])
    shown = texts(figure)
    assert any("1 failure" in text for text in shown), shown
    assert "rank 3 was killed by SIGKILL" in shown
    (mark,) = [line for line in figure.axes[1].lines if len({*line.get_xdata()}) == 1 and line.get_color() == "#c92a2a"]
    assert mark.get_xdata()[0] == pytest.approx(30.0), "before the stop, in seconds of the run"
    plt.close(figure)


def test_a_failure_whose_ledger_is_missing_is_counted() -> None:
    figure = run_plots.figure_of_run(plt, SPANS[4:], [failure("was killed by SIGKILL", 130.5)])
    assert any("1 failure" in text for text in texts(figure))
    plt.close(figure)


@pytest.mark.parametrize("text", ["cost $5 and \\frac{$ x", "$x$", "a\udcffb", "a\x1b[31mb"])
def test_texts_with_any_characters_are_drawn_as_they_are(tmp_path: Path, text: str) -> None:
    start = LogEntry(1, 99.0, 0, "start", "", {
        "ranks": 1, "members": [{"name": "a", "incarnation": "i", "first": 0, "count": 1}], "address": "a", "port": 7,
        "command": ["true", text],
    })  # fmt: skip
    entries = [start, failure(f"exited with status 1 ({text})", 130.5)]
    run_plots.draw_run(SPANS, entries, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    figure = run_plots.figure_of_run(plt, SPANS, entries)
    escaped = text.encode("unicode_escape").decode() if not text.isprintable() else text
    assert {f"1 rank: true {escaped}", f"rank 3 exited with status 1 ({escaped})"} <= set(texts(figure))
    plt.close(figure)
