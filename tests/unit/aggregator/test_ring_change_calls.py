"""Calls of a ring change that are slow, or that members do not get: each record moves to all of its new members."""

from __future__ import annotations

import contextlib
import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.nodes import directories
from helpers.replica_sets import assert_all_files_exist, make_three_member_namespace, record_members

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance, repair, scrub
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.aggregator.records import ring_change
from ckpt.aggregator.records.ring_change import change_ring
from ckpt.storage.base.errors import Outdated, Unavailable
from ckpt.storage.registers.base import Ballot, DirectChange, Register, RegisterAnswer


def test_a_change_after_the_listing_of_an_unfenced_member_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One member misses the fence, another one the listing. The first one is the second voter of a change after its listing.

    Found by the model of `tests/helpers/register_model.py`.
    """
    make_three_member_namespace(tmp_path, 4)
    mover = Namespace(directories(tmp_path, 4, deadline_seconds=2.0))
    mover.put("template", b"acknowledged")
    first, second, _ = mover.ring.replica_set("/late").members
    (record,) = mover.open_members[first].registers.read(["/template"])
    assert isinstance(record, Register)
    assert record.value is not None
    change = [DirectChange("/late", Ballot(0, ""), record.value)]
    voters = [Namespace(directories(tmp_path, 4)).open_members[name].registers for name in (first, second)]
    votes = voters[0].change(change, "writer", 1)
    fence, scan = mover.open_members[second].registers.fence, mover.open_members[second].registers.scan
    answers = itertools.chain([False], itertools.repeat(True))

    def miss_the_first(number: int) -> bool:
        if next(answers):
            return fence(number)
        raise Unavailable("lost on the way")

    def vote_after_listing(prefix: str, *arguments: Any, **options: Any) -> list[tuple[str, RegisterAnswer]]:
        found = scan(prefix, *arguments, **options)
        if prefix == "" and not votes[1:]:
            with contextlib.suppress(Outdated):
                votes.extend(voters[1].change(change, "writer", 1))
        return found

    def refuse(*_: Any, **__: Any) -> list[tuple[str, RegisterAnswer]]:
        raise Unavailable("lost on the way")

    having_it_when_moved: list[str] = []

    def note_members(point: str) -> None:
        if point == "ring.moved":
            having_it_when_moved.extend(m.name for m in mover.locations if scans[m.name]("/late"))

    scans = {name: m.registers.scan for name, m in mover.open_members.items()}
    monkeypatch.setattr(mover.open_members[second].registers, "fence", miss_the_first)
    monkeypatch.setattr(mover.open_members[second].registers, "scan", vote_after_listing)
    monkeypatch.setattr(mover.open_members[first].registers, "scan", refuse)
    monkeypatch.setattr(ring_change, "failpoint", note_members)
    change_ring(mover, [s for s in mover.locations if s.name != first])
    is_acknowledged = votes == [True, True]
    assert not is_acknowledged or len(set(having_it_when_moved) - {first}) >= 2, "the new members lost it"


@pytest.mark.slow
@pytest.mark.parametrize("change", ["repair", "rebalance", "removal"])
def test_members_that_are_slow_in_a_ring_change_get_all_records(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new member writes records late, once a quorum has them and the ring has changed: it refuses them then."""
    make_three_member_namespace(tmp_path, 3)
    namespace = Namespace(directories(tmp_path, 5, redundancy="3x"))
    slow, late = namespace.open_members["disk3"].registers, threading.Event()
    accept, fence = slow.accept, slow.fence

    def accept_late(*arguments: object, **options: object) -> list[bool]:
        late.wait(600)
        return accept(*arguments, **options)  # type: ignore[arg-type]

    def count_fences(number: int) -> None:
        fence(number)
        if number >= moved_epoch:
            late.set()

    moved_epoch = namespace.ring.epoch + 2
    monkeypatch.setattr(slow, "accept", accept_late)
    monkeypatch.setattr(slow, "fence", count_fences)
    if change == "repair":
        done = repair.repair_namespace(
            namespace, replace(scrub.scrub_namespace(namespace), insufficient_redundancy=parse_redundancy("3x"))
        )
    elif change == "rebalance":
        done = rebalance.rebalance_fragments(namespace)
    else:
        done = rebalance.remove_member(namespace, "disk0")
    assert not done.failed
    assert late.is_set()
    assert "disk3" in record_members(namespace)
    found = scrub.scrub_namespace(namespace)
    assert not found.lagging_paths
    assert_all_files_exist(namespace)
