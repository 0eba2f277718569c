"""ckpt-run replaces a host that is slower than the others."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.host_runs import Job, assert_result, starts
from helpers.host_runs import job as job
from helpers.processes import free_port

from ckpt.recovery.run_log.sqlite import SqliteRunLog

PROGRAM = str(PROGRAMS / "job_with_straggler.py")
RUN = [sys.executable, "-m", "ckpt.tools.run"]


def log(files: Path) -> list[dict]:  # type: ignore[type-arg]
    done = subprocess.run([*RUN, "why", "--json", "--run-dir", str(files)], capture_output=True, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()]


def straggler_notes(files: Path) -> list[dict]:  # type: ignore[type-arg]
    return [entry for entry in log(files) if entry["kind"] == "note" and "straggler" in entry["facts"]]


@pytest.mark.parametrize("words", [(), ("together", "marked")])
def test_a_straggler_on_one_host_is_reported_and_kept(tmp_path: Path, words: tuple[str, ...]) -> None:
    """It is detected and reported in the log, in status, in the report and in the metrics; no host is replaced."""
    files, port = tmp_path / "run", free_port()
    command = [*RUN, "-n", "4", "--run-dir", str(files), "--straggler-after", "1", "--cold", "--straggler", "2"]
    command += ["--metrics", f"127.0.0.1:{port}", "--dir", str(tmp_path / "repo")]
    program = [sys.executable, PROGRAM, str(tmp_path), "0.02", "6", *words]
    run = subprocess.Popen([*command, "--", *program], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        deadline = time.monotonic() + 600
        while not straggler_notes(files):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        status = subprocess.run([*RUN, "status", "--run-dir", str(files)], capture_output=True, text=True, check=True).stdout
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    finally:
        run.send_signal(signal.SIGTERM)
        _, output = run.communicate(timeout=600)
    assert run.returncode == 128 + signal.SIGTERM
    (note,) = straggler_notes(files)
    assert note["facts"]["straggler"] == 2
    assert note["facts"]["times"] > 2
    assert ("without what it waits for" in note["text"]) == bool(words)
    assert f"ckpt-run: {note['text']}" in output.splitlines()
    assert note["text"] in status
    assert f"checkpoints in {tmp_path / 'repo'}" in status
    assert 'ckpt_run_straggler_ratio{rank="2"' in metrics
    assert ('ckpt_run_rank_compute_seconds_total{rank="2"}' in metrics) == bool(words)
    report = subprocess.run([*RUN, "report", "--run-dir", str(files)], capture_output=True, text=True, check=True).stdout
    assert f"attempt 0: {note['text']}" in report
    assert [entry["kind"] for entry in log(files) if entry["kind"] in ("failure", "start")] == ["start", "failure"]


def test_a_spare_replaces_a_slow_host(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is repeated."""
    run = job("--straggler", "2", "--straggler-after", "1", "--spares", "1", hosts=2, steps=80)
    run.start("a")
    monkeypatch.setenv("CKPT_TEST_SLOW", "6")  # only host b is slow
    run.start("b")
    monkeypatch.delenv("CKPT_TEST_SLOW")
    record, deadline = SqliteRunLog(run.folder / "run"), time.monotonic() + 600
    while not starts(record.entries()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    record.close()
    run.start("c")
    assert run.ends(*"abc") == {"a": 0, "b": 0, "c": 0}
    entries = run.log()
    kinds_and_texts = [(e.kind, e.text) for e in entries]
    assert sorted(starts(entries)[0]) == ["a", "b"]
    assert sorted(starts(entries)[-1]) == ["a", "c"], kinds_and_texts
    assert {e.facts["host"] for e in entries if e.kind == "note" and "straggler" in e.facts} == {"b"}, kinds_and_texts
    moved = [e.facts for e in entries if e.kind == "failure" and e.facts["cause"] == "straggler"]
    assert {facts["host"] for facts in moved} == {"b"}, kinds_and_texts
    assert all(facts["step"] == facts["committed"] for facts in moved), "a step is repeated"
    assert "b is left out, as rank" in run.messages("a")
    assert_result(run, 4)
