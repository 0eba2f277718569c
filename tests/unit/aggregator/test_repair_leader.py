"""The repair leader of a namespace: one at a time, replaced once it is gone, and no faster than its limit."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
from helpers.nodes import directories
from helpers.processes import until

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance, scrub
from ckpt.aggregator.maintenance.repair_leader import Election, RepairLeader
from ckpt.storage.testing import random_bytes


@pytest.fixture
def namespace(tmp_path: Path) -> Namespace:
    made = Namespace(directories(tmp_path, 4))
    made.put("a", b"1")
    return made


def test_one_repair_leader_is_elected_at_a_time(namespace: Namespace) -> None:
    first, second = Election(namespace, "first", 1e6), Election(namespace, "second", 1e6)
    assert first.try_lead()
    assert [second.try_lead() for _ in range(3)] == [False] * 3
    assert first.try_lead(), "renewed"
    assert Election(namespace, "first", 1e6).try_lead(), "started again"
    assert not second.try_lead()


def test_a_repair_leader_that_is_gone_is_replaced(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds whatever its clock showed."""
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 1e8)  # three years ahead
        assert Election(namespace, "first", 0.05).try_lead()
    second = Election(namespace, "second", 0.05)
    assert not second.try_lead(), "the first may be alive: it was not observed yet"
    time.sleep(0.05)
    assert second.try_lead()
    assert not Election(namespace, "first", 0.05).try_lead(), "it returns, and does not lead any more"


@pytest.mark.slow
def test_a_repair_leader_that_renews_stays(namespace: Namespace) -> None:
    """It is observed for long, but never the same term for long."""
    first, second = Election(namespace, "first", 1.0), Election(namespace, "second", 0.3)
    assert first.try_lead()
    for _ in range(3):
        assert not second.try_lead()
        time.sleep(0.4)
        assert first.try_lead()


@pytest.mark.slow
def test_the_repair_leader_repairs_within_its_rate(namespace: Namespace, tmp_path: Path) -> None:
    """A lost disk is rebuilt no faster than allowed: the writes take a second at least."""
    for i in range(4):
        namespace.put(f"f{i}", random_bytes(1_000_000, i))
    namespace.settle([f"/f{i}" for i in range(4)])
    shutil.rmtree(next(tmp_path.glob("disk*/objects")))
    lost = sum(f.file.head.nbytes for f in scrub.scrub_namespace(namespace).damaged_files)
    assert lost
    began = time.monotonic()
    leader = RepairLeader(lambda: namespace, "me", 0.05, bytes_per_second=lost)
    try:
        while not scrub.scrub_namespace(namespace).is_whole:
            assert time.monotonic() - began < 60
            time.sleep(0.05)
        assert time.monotonic() - began >= 1.0
    finally:
        leader.close(60)
    for i in range(4):
        assert namespace.get(f"f{i}") == random_bytes(1_000_000, i)


def test_a_rebalance_reports_the_bytes_to_move_in_advance(namespace: Namespace, tmp_path: Path) -> None:
    for i in range(20):
        namespace.put(f"f{i}", random_bytes(40_000, i))
    namespace.close()
    grown = Namespace(directories(tmp_path, 6))
    moved: list[int] = []
    expected: list[int] = []
    done = rebalance.rebalance_fragments(grown, moved.append, expected.append)
    assert not done.failed
    assert sum(expected) == sum(moved) == done.nbytes > 0
    grown.close()


@pytest.mark.slow
def test_one_process_repairs_while_a_round_takes_several_terms(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that reads all data takes hours, and a term half an hour: the leader stays leader meanwhile."""
    interval_seconds = 0.5
    repairing: list[RepairLeader] = []
    ended = threading.Event()

    def repair_slowly(leader: RepairLeader, verify: bool) -> None:
        repairing.append(leader)
        ended.wait(300)

    monkeypatch.setattr(RepairLeader, "repair_once", repair_slowly)
    leaders = [RepairLeader(lambda: namespace, name, interval_seconds) for name in ("first", "second")]
    try:
        until(lambda: bool(repairing))
        time.sleep(8 * interval_seconds)
        assert len(repairing) == 1
    finally:
        ended.set()
        for leader in leaders:
            leader.close(60)


def test_the_next_process_repairs_once_the_leader_is_gone(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that ended renews its term no more."""
    monkeypatch.setattr(RepairLeader, "repair_once", lambda leader, verify: rounds.append(leader))
    rounds: list[RepairLeader] = []
    first = RepairLeader(lambda: namespace, "first", 0.1)
    until(lambda: bool(rounds))
    second = RepairLeader(lambda: namespace, "second", 0.1)
    first.close(60)
    try:
        until(lambda: second in rounds)
    finally:
        second.close(60)
