"""Replaced reports do not fill etcd, readers survive a compaction, and a full etcd is reported with what to do."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.agent_worlds import agent
from helpers.etcd_server import EtcdProcess, needs_etcd
from helpers.etcd_server import running_etcd as running_etcd
from helpers.host_runs import ETCD, Job, assert_result
from helpers.host_runs import job as job
from helpers.processes import until

from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.recovery.coordinator import coordinator
from ckpt.recovery.coordinator.coordinator import Coordinator
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.etcd import EtcdRunLog
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.errors import StoreError, Unavailable

pytestmark = needs_etcd
REPORT_BYTES = 20_000
MINUTES = 40


def _url(server: EtcdProcess) -> str:
    return f"etcd://{server.endpoint.removeprefix('http://')}/lab"


def _has_revision(client: EtcdClient, revision: int) -> bool:
    """Return whether etcd still has the state of this revision."""
    try:
        client._call("kv/range", {"key": "YQ==", "revision": str(revision)})
    except StoreError as error:
        assert "compacted" in str(error)
        return False
    return True


def _begin(run_log: EtcdRunLog) -> RunState:
    run = entry_drafts.draft_run(0, "r", RunSpec(("true",), ranks=1, hosts=1))
    assert run_log.append(0, [run, Draft(0, "lead", "", {"name": "a"})])
    return RunState().apply_entries(run_log.entries())


def test_the_leader_frees_the_reports_of_some_minutes_ago(server: EtcdProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old revisions are gone, younger ones are kept, and the space in use stays bounded."""
    clock = [100.0]
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(coordinator, "draft_next_entries", lambda view: [])
    client, run_log = EtcdClient(server.endpoints, 300), EtcdRunLog(_url(server))
    run_log._etcd._deadline_seconds = 300.0
    run_state, leading, following = _begin(run_log), Coordinator(run_log, True), Coordinator(run_log, True)
    revisions, sizes = [], []
    for minute in range(MINUTES):
        clock[0] += 60.0
        for beat in range(20):
            run_log.publish_report("a", {"beat": beat, "text": "x" * REPORT_BYTES})
        following.coordinate(run_state, agent("b", leaving=15))
        leading.coordinate(run_state, agent("a"))
        revisions.append(client.current_revision("/"))
        sizes.append(int(client._call("maintenance/status", {})["dbSizeInUse"]))
        assert _has_revision(client, revisions[max(0, minute - 4)]), "the last minutes are kept"
    assert not _has_revision(client, revisions[0])
    assert not _has_revision(client, revisions[-8])
    assert max(sizes) < 20 * REPORT_BYTES * 15, "in use: the reports of about seven minutes"
    assert run_log.reports() == {"a": {"beat": 19, "text": "x" * REPORT_BYTES}}
    assert [entry.kind for entry in run_log.entries()] == ["run", "lead"]


def test_a_failed_compaction_is_logged_once_and_tried_again(
    server: EtcdProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_log = EtcdRunLog(_url(server))
    now = 0.0
    with caplog.at_level(logging.WARNING, "ckpt.run"):
        for _ in range(8):
            now += 60.0
            run_log.compact(now)
        server.kill()
        for _ in range(3):
            now += 60.0
            run_log.compact(now)
    (warning,) = caplog.messages
    assert "etcd can't be compacted" in warning
    assert "--auto-compaction-retention" in warning
    server.start()
    client = EtcdClient(server.endpoints, 300)
    client.put("/a", b"1")
    first = client.current_revision("/")
    for _ in range(8):
        now += 60.0
        client.put("/a", b"1")
        run_log._etcd._deadline_seconds = 300.0
        run_log.compact(now)
    assert not _has_revision(client, first)


def test_another_compaction_is_no_failure(server: EtcdProcess, caplog: pytest.LogCaptureFixture) -> None:
    """etcd compacts by itself, or the leader of another run does."""
    run_log, client = EtcdRunLog(_url(server)), EtcdClient(server.endpoints, 300)
    run_log._etcd._deadline_seconds = 300.0
    with caplog.at_level(logging.WARNING, "ckpt.run"):
        for minute in range(12):
            client.put("/a", b"1")
            client.compact(client.current_revision("/"))
            run_log.compact(60.0 * minute)
    assert caplog.messages == []


class _Compacted(EtcdClient):
    """A client of an etcd that is changed and compacted after the first page of a range."""

    compactions = 0

    def _call(self, method: str, message: Mapping[str, object]) -> dict[str, Any]:
        answer = super()._call(method, message)
        if method == "kv/range" and not self.compactions:
            self.compactions += 1
            self.put("/b", b"1")
            self.compact(self.current_revision("/"))
        return answer


def test_a_range_whose_revision_was_compacted_is_read_anew(server: EtcdProcess) -> None:
    etcd = _Compacted(server.endpoints, 300)
    for number in range(7):
        etcd.put(f"/a/{number}", b"1")
    assert [item.key for item in etcd.range("/a/", page_keys=3)] == [f"/a/{number}" for number in range(7)]
    assert etcd.compactions == 1


@ETCD
def test_a_run_continues_while_etcd_is_compacted(job: Any) -> None:
    run: Job = job(steps=60)
    for name in "abc":
        run.start(name)
    client = EtcdClient((f"http://{run.state[1].removeprefix('etcd://').partition('/')[0]}",), 300)

    def has_done(step: int) -> bool:
        with suppress(StoreError):  # the revision is the same as at the last compaction
            client.compact(client.current_revision("/"))
        return min((run._step(run.folder / f"at-0-{rank}") for rank in range(6)), default=-1) >= step

    until(lambda: has_done(40), "steps are done while etcd is compacted")
    assert set(run.ends(*"abc").values()) == {0}
    assert not [entry for entry in run.log() if entry.kind == "failure"]
    assert_result(run, 6)


def _fill(client: EtcdClient) -> StoreError:
    """Write until etcd refuses it, and return its error."""
    with pytest.raises(StoreError) as caught:
        while True:
            client.put("/full", b"x" * 500_000)
    return caught.value


def test_a_full_etcd_is_reported_with_what_to_do(tmp_path: Path) -> None:
    server = EtcdProcess(tmp_path / "etcd")
    server.options = ("--quota-backend-bytes", "4000000")
    try:
        server.start()
        error = _fill(EtcdClient(server.endpoints, 300))
    finally:
        server.kill()
    assert isinstance(error, Unavailable)
    assert str(error).startswith("etcd is full")
    assert "does not answer" not in str(error)
    assert all(word in str(error) for word in ("NOSPACE", server.endpoint, "compact", "defrag", "alarm disarm"))
    assert len(str(error)) <= 200
