"""What one member does with a call in models of records, by the rules of `storage/registers/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

from ckpt.aggregator.placement.redundancy import quorum
from ckpt.aggregator.records.replica_set import ReplicaSet, VotingGroup
from ckpt.storage.registers.base import (
    REGISTERS_INCOMPLETE,
    Register,
    RegisterAnswer,
    can_accept,
    can_change_directly,
    can_collect,
    with_floor_promise,
    with_promise,
)
from ckpt.storage.registers.fence_numbers import advance_fence, order_key

PATH = "/x"
OUTDATED = "outdated"

Step = tuple[Any, ...]


class MemberState(NamedTuple):
    """What one member has stored."""

    record: Register | None
    fence: int
    is_complete: bool


def voting_group(members: Sequence[str]) -> VotingGroup:
    """Return these members as a group that tolerates the loss of one."""
    return VotingGroup(tuple(members), quorum(1, len(members)))


def execute(member: MemberState, call: tuple[Any, ...]) -> tuple[MemberState, Any]:
    """Return a member after a call, and its answer."""
    name, *arguments = call
    fence = arguments[-1]
    if order_key(fence) < order_key(member.fence):
        return member, OUTDATED
    if name == "read":
        return member, answer_of(member)
    fenced = member._replace(fence=advance_fence(member.fence, fence))
    record = answer_of(fenced)
    if name == "scan":
        return fenced, record
    if name == "prepare":
        promised = with_promise(record, arguments[0])
        return (fenced._replace(record=promised), promised) if promised is not None else (fenced, record)
    if name in ("accept", "restore"):
        value, ballot = arguments[:2]
        is_accepted = can_accept(record, ballot, name == "restore")
        return (fenced._replace(record=Register(ballot, ballot, value)) if is_accepted else fenced), is_accepted
    if name == "change":
        change, writer = arguments[:2]
        is_changed = can_change_directly(record, change)
        ballot = change.expected.next_step(writer)
        return (fenced._replace(record=Register(ballot, ballot, change.value)) if is_changed else fenced), is_changed
    if name == "collect":
        may_collect = can_collect(record, arguments[0], fenced.fence)
        return (fenced._replace(record=None) if may_collect else fenced), may_collect
    return fenced._replace(record=None) if name == "drop" else fenced, True


def is_without_effect(member: MemberState, call: tuple[Any, ...]) -> bool:
    """Return whether a call can't change a member at any later time. Promises, accepted ballots and fences only rise."""
    if call[0] == "read" or order_key(call[-1]) < order_key(member.fence):
        return True
    record = answer_of(member)
    if call[0] in ("fence", "scan"):
        return order_key(member.fence) >= order_key(call[-1])
    if not isinstance(record, Register):
        return False
    if call[0] in ("prepare", "accept", "restore"):
        return record.promised_ballot > call[1 if call[0] == "prepare" else 2]
    if call[0] == "change":
        return record.promised_ballot > call[1].expected
    if call[0] == "collect":
        return record.accepted_ballot != call[1] or member.record is None
    return False


def answer_of(member: MemberState) -> RegisterAnswer:
    """Return what a member answers for the path."""
    if member.record is None:
        return with_floor_promise(Register(), member.fence) if member.is_complete else REGISTERS_INCOMPLETE
    return member.record if member.record.value is not None else with_floor_promise(member.record, member.fence)


@lru_cache
def read_quorums(replicas: ReplicaSet) -> tuple[tuple[str, ...], ...]:
    """Return the smallest sets of members that are a quorum for a read in each group."""
    return _smallest(replicas, replicas.can_read)


@lru_cache
def write_quorums(replicas: ReplicaSet) -> tuple[tuple[str, ...], ...]:
    """Return the smallest sets of members that are a quorum for a change in each group."""
    return _smallest(replicas, replicas.can_write)


def _smallest(replicas: ReplicaSet, is_quorum: Callable[[Sequence[str]], bool]) -> tuple[tuple[str, ...], ...]:
    members = replicas.members
    found: list[tuple[str, ...]] = []
    for count in range(1, len(members) + 1):
        for voters in combinations(members, count):
            if is_quorum(voters) and not any(set(each) <= set(voters) for each in found):
                found.append(voters)
    return tuple(found)


def log_of(record: Register) -> bytes:
    """Return the changes that made the value of a record."""
    return b"" if record.value is None else record.value.head


def text_of(value: bytes) -> str:
    """Return a value for messages."""
    return repr(value.decode())
