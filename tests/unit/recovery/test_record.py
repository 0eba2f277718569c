"""The log of a run in a file: what is appended is durable, and reports do not touch it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.sqlite import SqliteRunLog


def test_reports_do_not_write_the_file_of_the_log(tmp_path: Path) -> None:
    record = SqliteRunLog(tmp_path)
    assert record.append(0, [Draft(0, "note", "one")])
    before = {path.name: path.read_bytes() for path in tmp_path.glob("run.sqlite*")}
    for beat in range(50):
        record.publish_report("a", {"beat": beat, "text": "x" * 1000})
    record.publish_report("b.c", {"beat": 1})
    assert {path.name: path.read_bytes() for path in tmp_path.glob("run.sqlite*")} == before
    assert record.reports()["a"]["beat"] == 49
    (tmp_path / "agents" / "a.json").write_bytes(b'{"beat"')
    assert set(record.reports()) == {"b.c"}
    record.remove_report("b.c")
    record.remove_report("b.c")
    assert record.reports() == {}
    (synchronous,) = record._db.execute("PRAGMA synchronous").fetchone()
    assert synchronous == 2, "FULL"
    record.close()


def test_the_log_of_an_earlier_version_is_read(tmp_path: Path) -> None:
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
        record = SqliteRunLog(tmp_path, read_only)
        assert [entry.text for entry in record.entries()] == ["old"]
        assert record.reports() == {}
        record.close()
