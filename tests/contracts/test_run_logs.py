"""The contract of run logs, on a SQLite file and on etcd."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.etcd_server import EtcdProcess, needs_etcd

from ckpt.aggregator.cluster.etcd_client import EtcdItem
from ckpt.recovery.run_log.agent_name import NameTaken
from ckpt.recovery.run_log.base import Draft, RunLog, open_run_log
from ckpt.recovery.run_log.etcd import EtcdRunLog

Opener = Callable[[], RunLog]
"""Opens the same run log once more, as another agent does."""

ONE, TWO, THREE = (Draft(0, "note", text, {"text": text}) for text in ("one", "two", "three"))


@pytest.fixture(scope="module")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server.endpoint.removeprefix("http://")
    server.kill()


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=needs_etcd)])
def open_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    url = None
    if request.param == "etcd":
        url = f"etcd://{request.getfixturevalue('etcd_endpoint')}/{secrets.token_hex(4)}"
    opened: list[RunLog] = []

    def open_again() -> RunLog:
        opened.append(open_run_log(tmp_path / "run", url))
        return opened[-1]

    yield open_again
    for run_log in opened:
        run_log.close()


def texts(run_log: RunLog, after: int = 0) -> list[tuple[int, str]]:
    """Return the number and the text of the entries after a number."""
    return [(entry.number, entry.text) for entry in run_log.entries(after)]


def test_a_new_log_is_empty(open_log: Opener) -> None:
    run_log = open_log()
    assert run_log.entries() == []
    assert run_log.reports() == {}


def test_entries_are_numbered_from_1_in_order(open_log: Opener) -> None:
    run_log = open_log()
    assert run_log.append(0, [ONE, TWO])
    assert run_log.append(2, [THREE])
    assert texts(run_log) == [(1, "one"), (2, "two"), (3, "three")]
    assert texts(run_log, after=2) == [(3, "three")]
    assert texts(run_log, after=3) == []


def test_an_entry_is_read_as_it_was_appended(open_log: Opener) -> None:
    draft = Draft(7, "note", "a line\nand 雪", {"text": "é", "ranks": [1, 2], "missing": None, "seconds": 0.5})
    assert open_log().append(0, [draft])
    (entry,) = open_log().entries()
    assert (entry.attempt, entry.kind, entry.text) == (draft.attempt, draft.kind, draft.text)
    assert entry.facts == draft.facts
    assert entry.at > 1e9


def test_a_text_may_have_the_bytes_of_any_path(open_log: Opener) -> None:
    """Python has a byte of a path that is not UTF-8 as a surrogate."""
    assert open_log().append(0, [Draft(0, "note", "look at caf\udce9/rank-0.log", {"text": "caf\udce9"})])
    (entry,) = open_log().entries()
    assert entry.text.startswith("look at caf")
    assert entry.text.endswith("/rank-0.log")


def test_of_several_writers_at_one_position_one_appends(open_log: Opener) -> None:
    logs = [open_log() for _ in range(4)]
    drafts = [[Draft(0, "note", f"{writer}.{i}") for i in range(3)] for writer in range(4)]
    with ThreadPoolExecutor(4) as pool:
        appended = list(pool.map(lambda log, group: log.append(0, group), logs, drafts))
    assert appended.count(True) == 1
    winner = appended.index(True)
    assert texts(logs[0]) == [(i + 1, f"{winner}.{i}") for i in range(3)], "all entries of one writer, and none of the others"


def test_an_append_at_an_old_position_changes_nothing(open_log: Opener) -> None:
    first, second = open_log(), open_log()
    assert first.append(0, [ONE, TWO])
    assert not second.append(0, [THREE])
    assert not second.append(1, [THREE])
    assert texts(second) == [(1, "one"), (2, "two")]
    assert second.append(2, [THREE])
    assert texts(first, after=2) == [(3, "three")]


def test_entries_outlive_the_process_that_appended_them(open_log: Opener) -> None:
    run_log = open_log()
    assert run_log.append(0, [ONE])
    run_log.close()
    assert texts(open_log()) == [(1, "one")]


def test_a_report_replaces_the_report_of_the_same_agent(open_log: Opener) -> None:
    first, second = open_log(), open_log()
    first.publish_report("a", {"beat": 1})
    second.publish_report("b.example", {"beat": 1, "text": "雪"})
    first.publish_report("a", {"beat": 2})
    assert second.reports() == first.reports() == {"a": {"beat": 2}, "b.example": {"beat": 1, "text": "雪"}}
    assert first.entries() == [], "a report is not an entry"


def test_an_agent_replaces_and_removes_its_own_reports_only(open_log: Opener) -> None:
    """Another agent of the same name is refused, unless it knows that the first one is lost."""
    first, second = open_log(), open_log()
    first.publish_report("a", {"incarnation": "one", "pid": 1, "address": "host-1", "joined": 1.5})
    with pytest.raises(NameTaken, match=r"an agent called a runs already \(process 1 at host-1, since .*\); end it, or"):
        second.publish_report("a", {"incarnation": "two"})
    second.remove_report("a", "two")
    first.publish_report("a", {"incarnation": "one", "beat": 2})
    assert first.reports() == {"a": {"incarnation": "one", "beat": 2}}
    second.publish_report("a", {"incarnation": "two"}, replaces="one")
    with pytest.raises(NameTaken):
        first.publish_report("a", {"incarnation": "one", "beat": 3})
    second.publish_report("a", {"incarnation": "two", "beat": 1})
    first.remove_report("a", "one")
    assert first.reports() == {"a": {"incarnation": "two", "beat": 1}}
    first.remove_report("a", "two")
    second.publish_report("a", {"incarnation": "two", "beat": 2})
    assert first.reports() == {"a": {"incarnation": "two", "beat": 2}}, "a report that was removed meanwhile is written again"


@needs_etcd
def test_a_report_that_is_replaced_during_its_removal_stays(etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (EtcdRunLog(f"etcd://{etcd_endpoint}/{name}") for name in [secrets.token_hex(4)] * 2)
    first.publish_report("a", {"incarnation": "one"})
    get = first._etcd.get

    def get_and_wait(key: str) -> EtcdItem:
        item = get(key)
        second.publish_report("a", {"incarnation": "two"}, replaces="one")
        return item

    monkeypatch.setattr(first._etcd, "get", get_and_wait)
    first.remove_report("a", "one")
    assert second.reports() == {"a": {"incarnation": "two"}}


def test_a_removed_report_is_missing(open_log: Opener) -> None:
    run_log = open_log()
    run_log.publish_report("a", {"beat": 1})
    run_log.publish_report("b", {"beat": 1})
    run_log.remove_report("a")
    run_log.remove_report("a")
    assert open_log().reports() == {"b": {"beat": 1}}
