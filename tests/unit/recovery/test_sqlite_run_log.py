"""The run log in a SQLite file: entries are durable, and reports are written elsewhere."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path

import pytest

from ckpt.recovery.run_log import report_files
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base.errors import Unavailable


def test_reports_do_not_write_the_file_of_the_run_log(tmp_path: Path) -> None:
    run_log = SqliteRunLog(tmp_path)
    assert run_log.append(0, [Draft(0, "note", "one")])
    before = {path.name: path.read_bytes() for path in tmp_path.glob("run.sqlite*")}
    for beat in range(50):
        run_log.publish_report("a", {"beat": beat, "text": "x" * 1000})
    run_log.publish_report("b.c", {"beat": 1})
    assert {path.name: path.read_bytes() for path in tmp_path.glob("run.sqlite*")} == before
    assert run_log.reports()["a"]["beat"] == 49
    (tmp_path / "agents" / "a.json").write_bytes(b'{"beat"')
    assert set(run_log.reports()) == {"b.c"}
    run_log.remove_report("b.c")
    run_log.remove_report("b.c")
    assert run_log.reports() == {}
    (synchronous,) = run_log._db.execute("PRAGMA synchronous").fetchone()
    assert synchronous == 2, "FULL"
    run_log.close()


def test_the_run_log_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "run.sqlite")
    old.execute(
        "CREATE TABLE entries (number INTEGER PRIMARY KEY, at REAL NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, "
        "text TEXT NOT NULL, facts TEXT NOT NULL)"
    )
    old.execute("CREATE TABLE agents (name TEXT PRIMARY KEY, facts TEXT NOT NULL)")
    old.execute("INSERT INTO entries VALUES (1, 5.0, 0, 'note', 'old', '{}')")
    old.execute("INSERT INTO agents VALUES ('a', '{\"beat\": 1}')")
    old.commit()
    old.close()
    for read_only in (True, False):
        run_log = SqliteRunLog(tmp_path, read_only)
        assert [entry.text for entry in run_log.entries()] == ["old"]
        assert run_log.reports() == {}
        run_log.close()


def test_reports_that_cannot_be_read_do_not_count_as_missing() -> None:
    """Hosts without reports count as lost."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, whose parents another user may not search
        os.chmod(folder, 0o755)
        run_log = SqliteRunLog(Path(folder))
        assert run_log.reports() == {}
        run_log.publish_report("a", {"beat": 1})
        os.chmod(f"{folder}/agents", 0)
        try:
            if user == 0:  # root may read all
                os.seteuid(65534)
            with pytest.raises(Unavailable, match="can't be read now"):
                run_log.reports()
        finally:
            os.seteuid(user)
            os.chmod(f"{folder}/agents", 0o700)
        assert run_log.reports() == {"a": {"beat": 1}}
        run_log.close()


@pytest.mark.parametrize("looks", [1, 2])
def test_a_report_replaced_during_its_removal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """It is replaced after the agent that ends has looked at it for the first or the second time."""
    first, second = (SqliteRunLog(tmp_path) for _ in range(2))
    first.publish_report("a", {"incarnation": "one"})
    seen: list[bytes] = []
    read_report = report_files._read_report

    def read_and_wait(path: Path) -> bytes:
        seen.append(data := read_report(path))
        if len(seen) == looks:
            second.publish_report("a", {"incarnation": "two"}, replaces="one")
        return data

    monkeypatch.setattr(report_files, "_read_report", read_and_wait)
    first.remove_report("a", "one")
    assert second.reports() == {"a": {"incarnation": "two"}}
    assert [path.name for path in (tmp_path / "agents").iterdir()] == ["a.json"]
    for run_log in (first, second):
        run_log.close()


@pytest.mark.parametrize("column", ["kind", "text", "facts"])
@pytest.mark.parametrize("read_only", [False, True])
def test_an_entry_that_is_damaged_so_that_it_is_not_utf_8_is_replaced_by_a_note(
    tmp_path: Path, column: str, read_only: bool
) -> None:
    """One flipped bit in a letter is enough. The entries before and after it count."""
    run_log = SqliteRunLog(tmp_path)
    assert run_log.append(0, [Draft(0, "request", text) for text in ("one", "twö", "three")])
    run_log._db.execute(f"UPDATE entries SET {column} = CAST(x'efff' AS TEXT) WHERE number = 2")
    run_log.close()
    run_log = SqliteRunLog(tmp_path, read_only)
    one, two, three = run_log.entries()
    assert (one.text, three.text, three.number) == ("one", "three", 3)
    assert two.kind == "note"
    assert "entry 2 of the log of the run is skipped: it can't be read" in two.text
    assert read_only or run_log.append(3, [Draft(0, "request", "four")])
    run_log.close()
