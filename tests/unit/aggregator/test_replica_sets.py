"""Quorums of one or two groups of members, the error where one is missing, and which members lag."""

from __future__ import annotations

import pytest

from ckpt.aggregator.placement.redundancy import Quorum
from ckpt.aggregator.records.replica_set import (
    ReplicaSet,
    VotingGroup,
    ballots_by_name,
    is_decided,
    is_lagging,
    is_unanimous,
    no_quorum_error,
    promises_given,
)  # fmt: skip
from ckpt.storage.base.errors import StoreError
from ckpt.storage.registers.base import NO_BALLOT, Ballot, DamagedRegister, Register, RegisterValue

LOW, HIGH = Ballot(1, "x"), Ballot(2, "x")
OLD, NEW = Register(LOW, LOW, RegisterValue(b"old")), Register(HIGH, HIGH, RegisterValue(b"new"))
DAMAGED = DamagedRegister("its checksum is wrong")
ONE = ReplicaSet((VotingGroup(("a", "b", "c"), Quorum(3, 2, 2)),), 1)
FIVE = ReplicaSet((VotingGroup(("a", "b", "c", "d", "e"), Quorum(5, write=4, read=2)),), 1)
MOVING = ReplicaSet((VotingGroup(("a", "b", "c"), Quorum(3, 2, 2)), VotingGroup(("b", "c", "d"), Quorum(3, 2, 2))), 2)


@pytest.mark.parametrize(
    ("replica_set", "members", "can_read", "can_write"),
    [
        (ONE, "ab", True, True), (ONE, "a", False, False), (ONE, "axy", False, False), (ONE, "", False, False),
        (FIVE, "ab", True, False), (FIVE, "abcd", True, True), (FIVE, "abc", True, False),
        (MOVING, "bc", True, True), (MOVING, "ab", False, False), (MOVING, "abd", True, True), (MOVING, "cd", False, False),
    ],
)  # fmt: skip
def test_a_quorum_is_needed_in_each_group(replica_set: ReplicaSet, members: str, can_read: bool, can_write: bool) -> None:
    assert replica_set.can_read([*members]) is can_read
    assert replica_set.can_write([*members]) is can_write


def test_the_members_of_two_groups_are_counted_once() -> None:
    assert ONE.members == ("a", "b", "c")
    assert MOVING.members == ("a", "b", "c", "d")


def test_the_newest_record_is_of_the_first_group() -> None:
    assert MOVING.newest({"a": OLD, "b": OLD, "d": NEW}) == OLD
    assert MOVING.newest({"a": OLD, "c": NEW, "d": OLD}) == NEW


def test_the_error_names_the_group_that_lacks_a_quorum() -> None:
    answers = {"a": OLD, "b": OLD, "c": DAMAGED}
    error = no_quorum_error(
        "p", MOVING, answers, {"d": StoreError("is silent"), "z": StoreError("is another one")}, is_write=True
    )
    assert str(error) == (
        "can't change p: 1 of the 3 members that keep its record answer, 2 are needed "
        "(c: its checksum is wrong; d: is silent); start the missing ones"
    )
    reading = no_quorum_error("p", FIVE, {"a": OLD, "z": DAMAGED}, {"b": StoreError("is silent")}, is_write=False)
    assert str(reading) == (
        "can't read p: 1 of the 5 members that keep its record answer, 2 are needed (b: is silent); start the missing ones"
    )
    assert "3 of the 5 members that keep its record answer, 4 are needed" in str(
        no_quorum_error("p", FIVE, {"a": OLD, "b": OLD, "c": OLD}, {}, is_write=True)
    )


def test_equal_answers_of_a_quorum_are_unanimous() -> None:
    assert is_unanimous({"a": NEW, "b": NEW}, ONE.can_read)
    assert is_unanimous({"a": NEW, "b": NEW, "c": DAMAGED}, ONE.can_read)
    assert not is_unanimous({"a": NEW, "b": OLD, "c": NEW}, ONE.can_read)
    assert not is_unanimous({"a": NEW, "b": DAMAGED}, ONE.can_read)


@pytest.mark.parametrize(
    ("ballots", "answering", "expected"),
    [
        ({"a": LOW, "b": LOW, "c": LOW}, "abc", False), ({"a": LOW, "b": HIGH, "c": LOW}, "abc", True),
        ({"a": LOW, "b": LOW}, "abc", True), ({"a": LOW, "b": LOW, "c": None}, "abc", True),
        ({"a": LOW, "b": LOW}, "ab", False), ({"a": LOW, "b": HIGH}, "a", False), ({"a": None}, "a", True), ({}, "abc", False),
        ({"a": NO_BALLOT, "b": NO_BALLOT}, "abc", False), ({"a": NO_BALLOT, "b": LOW}, "ab", True),
        ({"a": NO_BALLOT, "b": None}, "ab", True),
        ({"a": LOW, "b": LOW, "c": LOW, "d": HIGH}, "abcd", False),  # d keeps no copy
        ({}, "", False),
    ],
)  # fmt: skip
def test_members_with_another_value_or_none_lag(ballots: dict[str, Ballot | None], answering: str, expected: bool) -> None:
    assert is_lagging(ONE, ballots, [*answering]) is expected


def test_listings_are_compared_by_name() -> None:
    listed = {"a": [("f", NEW), ("g", OLD)], "b": [("f", DAMAGED)], "c": [("g", Register())]}
    assert ballots_by_name(listed) == {"f": {"a": HIGH, "b": None}, "g": {"a": LOW, "c": Ballot(0, "")}}


def test_only_undamaged_records_promise() -> None:
    assert promises_given({"a": NEW, "b": OLD, "c": DAMAGED}, HIGH) == {"a": True, "b": False}


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ({"a": True, "b": True}, True), ({"a": True}, False), ({"a": True, "b": False}, True), ({"a": False}, False),
        ({"a": False, "b": False}, True), ({}, False), ({"a": True, "b": False, "c": True}, True),
    ],
)  # fmt: skip
def test_votes_are_decided_once_a_quorum_has_agreed_or_one_of_it_refused(votes: dict[str, bool], expected: bool) -> None:
    assert is_decided(votes, ONE) is expected
