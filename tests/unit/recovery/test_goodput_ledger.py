"""The goodput ledger: its sums, its categories, its picture and its metrics."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

import click
import pytest
from helpers.ledgers import ROUNDING, assert_no_gap
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.recovery.agent import metrics
from ckpt.recovery.goodput.ledger import (
    LEDGER_FILE,
    GoodputLedger,
    LedgerSpan,
    ledger_file_name,
    merge_ledgers,
    process_start_time,
    read_ledgers,
    total_seconds_by_category,
)
from ckpt.recovery.goodput.time_category import TIME_CATEGORIES
from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base.errors import CkptError
from ckpt.tools import run_queries
from ckpt.training.heartbeat_page import HeartbeatPage


@pytest.mark.parametrize("attempts", [0, 1, 3, 40])
def test_a_picture_is_drawn_of_any_run(tmp_path: Path, attempts: int) -> None:
    """Zero, one, some and very many attempts; with steps and without."""
    pytest.importorskip("matplotlib")
    from ckpt.tools.run_plots import draw_run

    found, entries, at = [], [], 1e9
    for attempt in range(attempts):
        for name, seconds in (("spawn", 2.0), ("redo", 1.0), ("useful", 30.0), ("stop", 0.1)):
            at += seconds
            step = 30 * attempt if attempts == 3 else -1
            found.append(LedgerSpan(at, name, seconds, attempt, step, 30 * attempt - 1))  # type: ignore[arg-type]
        facts = {"ranks": [1], "cause": "signal"}
        entries.append(LogEntry(attempt, at - 0.05, attempt, "failure", "was killed by SIGKILL", facts))
    draw_run(found, entries, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.fixture
def run_asked_to_end(tmp_path: Path) -> Path:
    """Return the directory of a run on two hosts: b led from the middle on, and the run was asked to end."""
    run_log = SqliteRunLog(tmp_path)
    drafts = [
        entry_drafts.draft_run(0, "r", RunSpec(("true",), 2, hosts=2)),
        Draft(0, "lead", "a leads the run", {"name": "a"}),
        Draft(0, "start", "4 ranks on a, b: true", {"members": [], "memory": []}),
        Draft(0, "lead", "b leads the run from now on, as a is gone", {"name": "b"}),
        entry_drafts.draft_failure(0, Failure("asked", (0, 1, 2, 3), "have saved and ended on SIGTERM", 7, 7, 9.0, "a")),
        Draft(0, "decision", "it was asked to end", {"action": "halt", "wait": 0.0, "status": 143}),
    ]
    assert run_log.append(0, drafts)
    run_log.close()
    for name in "ab":
        ledger = GoodputLedger(tmp_path / ledger_file_name(name), time.monotonic() - 1)
        ledger.account("useful", 0)
        ledger.close()
    return tmp_path


def query(command: click.Command, folder: Path, *options: str) -> int:
    """Return the exit status of a subcommand of ckpt-run about the run in this directory."""
    return int(command.main(["--run-dir", str(folder), *options], standalone_mode=False))


def test_an_end_that_the_user_asked_for_is_no_failure(run_asked_to_end: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert query(run_queries.report, run_asked_to_end) == 0
    printed = capfd.readouterr()
    assert "; 0 failures\n" in printed.out
    assert not printed.err
    assert query(run_queries.report, run_asked_to_end, "--prometheus") == 0
    assert "ckpt_run_failures_total" not in capfd.readouterr().out


def test_a_report_names_the_hosts_whose_ledger_is_missing(run_asked_to_end: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run_asked_to_end / ledger_file_name("a")).unlink()
    assert query(run_queries.report, run_asked_to_end) == 0
    assert "this is only a part of the time: a also coordinated" in capfd.readouterr().err
    assert query(run_queries.report, run_asked_to_end, "--json") == 0
    assert json.loads(capfd.readouterr().out)["not_here"] == ["a"]


def test_a_report_names_the_folder_whose_ledger_cannot_be_read(run_asked_to_end: Path) -> None:
    ledger = run_asked_to_end / ledger_file_name("a")
    ledger.unlink()
    ledger.mkdir()
    for options in ((), ("--json",), ("--prometheus",)):
        with pytest.raises(CkptError, match=f"the ledger in {run_asked_to_end} can't be read: .*; check the folder"):
            query(run_queries.report, run_asked_to_end, *options)


def test_a_folder_whose_files_cannot_be_listed_has_no_empty_ledger() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, whose parents another user may not search
        (Path(folder) / LEDGER_FILE).write_text('{"at": 5.0, "name": "useful", "seconds": 2.0, "attempt": 0}\n')
        assert total_seconds_by_category(Path(folder)) == {"useful": 2.0}
        os.chmod(folder, 0o711 if user == 0 else 0o111)
        try:
            if user == 0:  # root may read all
                os.seteuid(65534)
            with pytest.raises(PermissionError):
                read_ledgers(Path(folder))
        finally:
            os.seteuid(user)
            os.chmod(folder, 0o700)


def test_a_report_without_a_ledger_names_the_hosts_that_have_one(
    run_asked_to_end: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run log is elsewhere, and names the hosts that have ledgers."""
    entries = run_queries._read_entries(run_asked_to_end, None)
    monkeypatch.setattr(run_queries, "_read_entries", lambda *_: entries)
    with pytest.raises(CkptError, match="has no ledger of this run; give the --run-dir of a or b"):
        query(run_queries.report, run_asked_to_end / "none", "--state", "etcd://127.0.0.1:1/lab")


def test_queries_of_a_run_that_ended_give_the_reason(run_asked_to_end: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its agents were killed, or it has ended: all subcommands report the same."""
    for text in ("it does not run: its agents are gone", "the run has ended: it was asked to end"):
        assert query(run_queries.status, run_asked_to_end) == 1
        assert capfd.readouterr().out.startswith(text)
        for command in (run_queries.plan, run_queries.drain):
            with pytest.raises(CkptError, match=text):
                query(command, run_asked_to_end)
        with contextlib.closing(SqliteRunLog(run_asked_to_end)) as run_log:
            run_log.append(6, [Draft(0, "end", "it was asked to end", {"status": 143})])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TIME_CATEGORIES), st.integers(0, 2), st.floats(0, 0.01), st.booleans()), max_size=20))
def test_the_sum_of_all_spans_is_the_elapsed_time(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int, float, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    began = time.monotonic()
    ledger = GoodputLedger(folder / LEDGER_FILE, began)
    for name, attempt, seconds, instead in calls:
        if instead:
            ledger.relabel(name, seconds)  # type: ignore[arg-type]
        else:
            ledger.account(name, attempt)  # type: ignore[arg-type]
    before = time.monotonic()
    ledger.close()
    found = read_ledgers(folder)
    assert_no_gap(found)
    assert before - began - ROUNDING <= sum(total_seconds_by_category(folder).values()) <= time.monotonic() - began + ROUNDING
    assert all(line.seconds > 0 for line in found)


def test_time_is_relabelled_when_its_category_is_known_late(tmp_path: Path) -> None:
    ledger = GoodputLedger(tmp_path / LEDGER_FILE, time.monotonic() - 10)
    ledger.account("useful", 0)
    ledger.relabel("detect", 4)
    ledger.account("stop", 0)
    ledger.account("useful", 1)
    ledger.relabel("wait", 100)  # no more than the time of this attempt
    ledger.close()
    seconds = total_seconds_by_category(tmp_path)
    assert seconds["useful"] == pytest.approx(6, abs=0.1)
    assert seconds["detect"] == pytest.approx(4, abs=1e-5)
    assert "stop" in seconds
    assert [line.attempt for line in read_ledgers(tmp_path) if line.name == "wait"] == [1]


def test_a_long_span_is_cut_where_the_job_makes_progress(tmp_path: Path) -> None:
    """The cuts show how far the job was. Idle time is not cut, and the cuts become rarer."""
    ledger = GoodputLedger(tmp_path / LEDGER_FILE, began := time.monotonic() - 1000)
    ledger._until = began + 990  # a span of eleven seconds from here on
    for step in (-1, 0, 1, 2):
        ledger.account("useful", 0, step, step)
        ledger._began -= 11
    ledger.account("wait", 0, 2, 2)
    ledger.close()
    found = [(line.name, line.step) for line in read_ledgers(tmp_path)]
    assert found == [("spawn", -1), ("useful", 0), ("useful", 1), ("useful", 2), ("wait", 2)]


def test_spans_that_have_ended_are_relabelled(tmp_path: Path) -> None:
    """Spans on the disk are included; ranks that wait for a lost one change between categories meanwhile."""
    ledger = GoodputLedger(tmp_path / LEDGER_FILE, time.monotonic() - 3)
    for name in ("useful", "stall", "useful"):
        ledger.account(name, 0)  # type: ignore[arg-type]
        time.sleep(0.05)
    ledger.account("stall", 0)
    ledger._write_spans()
    assert len(read_ledgers(tmp_path)) > 2
    ledger.relabel("detect", 2.0)
    ledger.close()
    found = read_ledgers(tmp_path)
    assert_no_gap(found)
    assert [line.name for line in found] == ["useful", "detect"]
    assert found[1].seconds == pytest.approx(2.0, abs=0.1)


def test_a_stopped_leader_counts_no_second_twice() -> None:
    """a leads until 10 and is stopped; b leads until 20, then a leads again."""
    a = [
        LedgerSpan(5, "spawn", 5, 0, since=0.0),
        LedgerSpan(18, "useful", 13, 0, since=0.0),
        LedgerSpan(19, "stall", 1, 0, since=0.0),
    ]
    b = [LedgerSpan(20, "detect", 10, 0, since=10.0), LedgerSpan(25, "useful", 5, 1, since=10.0)]
    again = [LedgerSpan(30, "useful", 10, 1, since=20.0)]
    found = merge_ledgers([b, a + again])
    assert_no_gap(found)
    assert [(line.name, line.seconds) for line in found] == [("spawn", 5), ("useful", 5), ("detect", 10), ("useful", 10)]
    assert merge_ledgers([a]) == a
    assert merge_ledgers([]) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 9), st.floats(0, 9)), min_size=1, max_size=8))
def test_ledgers_of_successive_leaders_add_up_to_the_elapsed_time(terms: list[tuple[str, float, float]]) -> None:
    """Each begins when the next leader takes over, and the former one still writes for a while."""
    files: dict[str, list[LedgerSpan]] = {name: [] for name in "abc"}
    at = 1e9
    for (name, seconds, more), (after, *_) in pairwise([*terms, ("", 0.0, 0.0)]):
        more = more if after not in ("", name) else 0.0
        files[name].append(LedgerSpan(at + seconds + more, "useful", seconds + more, 0, since=at))
        at += seconds
    found = merge_ledgers(list(files.values()))
    assert_no_gap(found)
    assert sum(line.seconds for line in found) == pytest.approx(at - 1e9, abs=1e-4)


def test_a_torn_last_line_of_a_ledger_is_ignored(tmp_path: Path) -> None:
    ledger = GoodputLedger(tmp_path / LEDGER_FILE, time.monotonic() - 5)
    ledger.account("useful", 0)
    ledger.close()
    whole = read_ledgers(tmp_path)
    with (tmp_path / LEDGER_FILE).open("a") as file:
        file.write('{"at": 17, "name": "use')
    again = GoodputLedger(tmp_path / LEDGER_FILE, time.monotonic() - 3)
    again.account("redo", 1)
    again.close()
    assert read_ledgers(tmp_path)[: len(whole)] == whole
    assert [line.name for line in read_ledgers(tmp_path)[len(whole) :]] == ["redo"]
    assert read_ledgers(tmp_path / "none") == []


def test_the_start_time_of_a_process_is_exact_to_a_tick() -> None:
    code = "import time; from ckpt.recovery.goodput.ledger import process_start_time as b; print(b(), time.monotonic())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    began, then = map(float, done.stdout.split())
    tick = 1 / os.sysconf("SC_CLK_TCK")  # the unit of the start time of a process
    assert before - tick <= began < then <= time.monotonic()
    assert process_start_time() <= time.monotonic()


def test_a_loss_is_a_metric_only_once_it_is_published(tmp_path: Path) -> None:
    page = HeartbeatPage(tmp_path / "0-0", new=True)
    page.beat(1, 3)
    assert "ckpt_run_loss" not in metrics.render_metrics([], {}, True, {0: page.read()})
    page.publish_loss(0.0)
    assert "ckpt_run_loss 0.0\n" in metrics.render_metrics([], {}, True, {0: page.read()})


def test_metrics_are_served_over_http() -> None:
    web = metrics.serve("127.0.0.1", 0, lambda: metrics.render_metrics([], {"useful": 1.0}, True))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{web.port}/metrics", timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert re.search(r'^ckpt_run_seconds_total\{name="useful"\} 1.0$', answer.read().decode(), re.MULTILINE)
        with pytest.raises(OSError):
            metrics.serve("127.0.0.1", web.port, str)
    finally:
        web.close()


def test_the_picture_names_a_lost_host() -> None:
    from ckpt.tools.run_plots import _describe_cause

    lost = LogEntry(3, 0.0, 1, "failure", "says nothing for 3 s", {"cause": "lost", "ranks": [], "host": "a"})
    assert _describe_cause(lost) == "host a says nothing for 3 s"


def test_a_ledger_that_cannot_be_opened_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt.recovery.goodput.ledger._WRITE_SECONDS", 0.0)
    path = tmp_path / LEDGER_FILE
    path.mkdir()
    ledger = GoodputLedger(path, time.monotonic() - 5)
    for _ in range(3):
        ledger.account("useful", 0)
    assert caplog.text.count("ledger.jsonl can't be written: Is a directory") == 1
    path.rmdir()
    ledger.account("useful", 0)
    assert total_seconds_by_category(tmp_path)["useful"] >= 5
    ledger.close()


def test_a_ledger_that_is_not_stored_at_its_close_ends_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full network file system may report an error only when the file is closed."""
    ledger = GoodputLedger(tmp_path / LEDGER_FILE, time.monotonic() - 5)
    ledger.account("useful", 0)

    def close_full(descriptor: int) -> None:
        os.closerange(descriptor, descriptor + 1)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_full)
        ledger.close()
    assert total_seconds_by_category(tmp_path)["useful"] >= 5
