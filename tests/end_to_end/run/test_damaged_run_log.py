"""Queries and the next run work with the entries of a run log that can be read."""

from __future__ import annotations

import sqlite3
import subprocess
from pathlib import Path

from helpers.faulty_runs import RUN
from helpers.processes import until


def query(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*RUN, *words, "--run-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_a_run_whose_first_entry_is_damaged_can_be_queried_drained_and_continued(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [*RUN, "--run-dir", str(tmp_path), "--", "sh", "-c", f"touch {ready}; exec sleep 3000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        until(ready.exists)
        with sqlite3.connect(tmp_path / "run.sqlite", timeout=300) as db:
            db.execute("UPDATE entries SET facts = '{}', text = CAST(x'ff' AS TEXT) WHERE kind = 'run'")
        db.close()
        status = query(tmp_path, "status")
        assert (status.returncode, "attempt 0" in status.stdout) == (0, True), status.stderr
        assert "entry 1 of the log of the run is skipped" in query(tmp_path, "why").stdout
        plan = query(tmp_path, "plan")
        assert plan.returncode == 1
        assert plan.stderr.splitlines()[-1] == (
            f"ckpt-run plan: the entry that begins the run can't be read: see `ckpt-run why --run-dir {tmp_path}`"
        )
        for done in (status, plan, query(tmp_path, "report"), query(tmp_path, "drain")):
            assert "Traceback" not in done.stderr
        messages = agent.communicate(timeout=600)[1]
        assert agent.returncode == 0, messages
    again = subprocess.run(
        [*RUN, "--run-dir", str(tmp_path), "--", "true"], capture_output=True, text=True, timeout=600, check=False
    )
    assert again.returncode == 0, again.stderr


def test_the_output_of_an_earlier_run_log_is_not_that_of_a_new_run(tmp_path: Path) -> None:
    """Its first attempt has the number 0 again, so its ranks append to the logs of the earlier run."""
    for text in ("old", "new"):
        (tmp_path / "run.sqlite").unlink(missing_ok=True)
        command = [
            *RUN,
            "--run-dir",
            str(tmp_path),
            "--restarts",
            "0",
            "--",
            "sh",
            "-c",
            f"test {text} = new || echo {text}; exit 3",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert (done.returncode, done.stdout) == (1, "old\n" if text == "old" else ""), done.stderr
    assert "rank 0 exited with status 3 before the first step" in done.stderr
    assert (tmp_path / "logs/0/rank-0.log").read_text() == "old\n"
