"""The goodput ledger of a run: its lines follow each other without a gap, from the start of ckpt-run to its end."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.ledgers import ROUNDING, assert_no_gap
from helpers.runs import Run

from ckpt.recovery.agent import metrics
from ckpt.recovery.goodput.ledger import LEDGER_FILE, GoodputLedger, goodput, read_ledgers, total_seconds_by_category
from ckpt.recovery.goodput.time_category import TIME_CATEGORIES
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.sqlite import RUN_LOG_FILE, SqliteRunLog
from ckpt.storage.base.errors import CkptError
from ckpt.tools import run_queries
from ckpt.training.heartbeat_records import RankHeartbeat


class Watched(Run):
    """A run whose log is read in this process: fast enough to kill a rank between two steps."""

    def record(self) -> list[dict]:  # type: ignore[type-arg]
        return [asdict(entry) for entry in SqliteRunLog(self.files).entries()] if (self.files / RUN_LOG_FILE).exists() else []


def report(run: Run, *options: str) -> str:
    command = [sys.executable, "-m", "ckpt.tools.run", "report", "--run-dir", str(run.files), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, float]:
    """Return a run with three failures that has ended with success, and its wall time."""
    began = time.monotonic()
    run = Watched(tmp_path_factory.mktemp("run") / "job", steps=80, seconds=0.05)
    try:
        for attempt, step in enumerate([11, 22, 33]):
            run.until_step(step, attempt)
            os.kill(run.pid(attempt), signal.SIGKILL if attempt != 1 else signal.SIGSTOP)
        assert run.end() == 0, run.messages
    finally:
        run.close()
    return run, time.monotonic() - began


def test_every_second_of_a_run_has_a_category(ended_run: tuple[Run, float]) -> None:
    run, wall = ended_run
    rows = read_ledgers(run.files)
    assert_no_gap(rows)
    seconds = total_seconds_by_category(run.files)
    entries = SqliteRunLog(run.files).entries()
    assert abs(sum(seconds.values()) - (rows[-1].at - rows[0].began)) < ROUNDING * len(rows)
    assert rows[0].began < entries[0].at, "the ledger does not begin with the process"
    assert rows[-1].at > entries[-1].at, "the ledger ends before the last log entry"
    assert sum(seconds.values()) < wall
    assert {line.attempt for line in rows} == {0, 1, 2, 3}
    assert {entry.attempt for entry in entries if entry.kind == "failure"} == {0, 1, 2}


def test_a_second_run_in_the_same_folder_continues_the_ledger(ended_run: tuple[Run, float]) -> None:
    run, _ = ended_run
    before = read_ledgers(run.files)
    again = Run(run.folder, steps=82)
    try:
        assert again.end() == 0, again.messages
    finally:
        again.close()
    rows = read_ledgers(run.files)
    assert rows[: len(before)] == before
    assert_no_gap(rows[len(before) :])
    assert rows[len(before)].began > before[-1].at


def test_the_ledger_of_a_killed_run_is_right_up_to_the_kill(tmp_path: Path) -> None:
    """The line of the present activity is written again and again in the same position, even if nothing happens."""
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path), "--", "sleep", "1000"]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 600
        while sum(total_seconds_by_category(tmp_path).values()) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(read_ledgers(tmp_path)) == 1
    finally:
        process.kill()
        process.wait()
    assert len(read_ledgers(tmp_path)) == 1
    assert total_seconds_by_category(tmp_path)["spawn"] >= 3


def test_the_report_is_written_in_prometheus_format(ended_run: tuple[Run, float]) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    run, _ = ended_run
    families = {family.name: family for family in text_string_to_metric_families(report(run, "--prometheus"))}
    seconds = {sample.labels["name"]: sample.value for sample in families["ckpt_run_seconds"].samples}
    assert set(seconds) == set(TIME_CATEGORIES)
    assert seconds == pytest.approx({name: total_seconds_by_category(run.files).get(name, 0.0) for name in TIME_CATEGORIES})
    causes = {sample.labels["cause"]: sample.value for sample in families["ckpt_run_failures"].samples}
    assert causes == {"signal": 2, "stopped": 1}
    assert families["ckpt_run_goodput_ratio"].samples[0].value == pytest.approx(goodput(seconds))
    assert families["ckpt_run_up"].samples[0].value == 0
    assert families["ckpt_run_goodput_ratio"].type == "gauge"
    assert families["ckpt_run_seconds"].type == "counter"


def test_the_report_is_drawn_as_a_picture(ended_run: tuple[Run, float], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run, _ = ended_run
    file = tmp_path / "run.of-today"  # a file name without a known suffix
    assert "3 failures" in report(run, "--png", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CkptError, match=f"the folder {tmp_path}/none does not exist; create it first"):
        run_queries.report.main(
            ["--run-dir", str(run.files), "--png", str(tmp_path / "none" / "run.png")], standalone_mode=False
        )
    json.loads(report(run, "--json"))


def test_a_full_disk_neither_stops_a_run_nor_loses_ledger_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on the file size behaves like a full disk, short writes included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ledger = GoodputLedger(tmp_path / LEDGER_FILE, time.monotonic() - 100)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        for number in range(6):
            ledger.account("useful" if number % 2 else "stall", 0)
            ledger.relabel("redo", 2.0)
            time.sleep(0.01)
            ledger._write_spans()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert caplog.text.count("can't be written") <= 2
    ledger.close()
    assert sum(total_seconds_by_category(tmp_path).values()) == pytest.approx(100, abs=5)
    assert_no_gap(read_ledgers(tmp_path))


def test_metrics_of_a_running_job_count_only_reporting_ranks() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    entries = [
        LogEntry(1, 0.0, 0, "start", "", {}),
        LogEntry(2, 1.0, 0, "failure", "", {"cause": 'a "bad"\nday\\'}),
        LogEntry(3, 1.0, 0, "decision", "", {"action": "restart"}),
        LogEntry(4, 1.0, 1, "start", "", {}),
        LogEntry(5, 2.0, 1, "failure", "", {"cause": "preempted"}),
    ]
    beats = {
        0: RankHeartbeat(5, 7, "step", 90.0, 4, 0.25, 11, None, None),
        1: RankHeartbeat(5, 6, "step", 99.5, 3, 0.5, 12, None, None),
    }
    beats[2] = RankHeartbeat(0, -1, "start", 1.0, -1, 0.0, 0)
    text = metrics.render_metrics(entries, {"useful": 3.0, "redo": 1.0}, True, beats, now=100.0)
    samples = {(s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["ckpt_run_up",] == 1
    assert samples["ckpt_run_attempt",] == 1
    assert [key for key in samples if key[0] == "ckpt_run_failures_total"] == [("ckpt_run_failures_total", 'a "bad"\nday\\')]
    assert samples["ckpt_run_decisions_total", "restart"] == 1
    assert samples["ckpt_run_goodput_ratio",] == 0.75
    assert samples["ckpt_run_step",] == 6, "a rank without a heartbeat counts"
    assert samples["ckpt_run_committed_step",] == 4
    assert samples["ckpt_run_loss",] == 0.25
    assert samples["ckpt_run_rank_silent_seconds", "0"] == 10


def test_a_host_without_a_ledger_exports_no_goodput() -> None:
    for seconds in ({}, {"useful": 0.0, "redo": 0.0}):
        text = metrics.render_metrics([], seconds, False)
        assert "ckpt_run_up 0\n" in text
        assert "goodput" not in text
        assert "ckpt_run_seconds_total" not in text


def test_metrics_are_served_on_a_port_or_skipped_if_it_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "ckpt.tools.run", "--metrics", f"127.0.0.1:{port}", "--run-dir"]
        first = [*command, str(tmp_path / "first"), "--", "true"]
        done = subprocess.run(first, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, "a port in use ends the run"
        assert f"127.0.0.1:{port} can't be listened on: Address already in use; give another --metrics" in done.stderr
    process = subprocess.Popen([*command, str(tmp_path / "second"), "--", "sleep", "1000"])
    try:
        deadline = time.monotonic() + 600
        text = ""
        while 'ckpt_run_seconds_total{name="spawn"}' not in text or "ckpt_run_attempt 0" not in text:
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                text = page.read().decode()
        assert "ckpt_run_up 1" in text
    finally:
        process.kill()
        process.wait()
