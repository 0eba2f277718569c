"""Which members decide about a register, and whether answers of some of them are enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ckpt.aggregator.placement.redundancy import Quorum
from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.registers.base import Ballot, DamagedRecord, Record, RegisterAnswer


@dataclass(frozen=True, slots=True)
class VotingGroup:
    """Members that keep the register of a path, and how many of them decide."""

    members: tuple[str, ...]
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The groups of a path: one, or while its record moves two. What is agreed is agreed in each."""

    groups: tuple[VotingGroup, ...]
    fence_number: int = 0
    """Of the ring that says so."""

    @property
    def members(self) -> tuple[str, ...]:
        if len(self.groups) == 1:
            return self.groups[0].members
        return tuple(dict.fromkeys(m for group in self.groups for m in group.members))

    def can_write(self, members: Collection[str]) -> bool:
        """Whether these are a quorum for a change."""
        return all(sum(m in members for m in g.members) >= g.quorum.write for g in self.groups)

    def can_read(self, members: Collection[str]) -> bool:
        """Whether these are a quorum for reading."""
        return all(sum(m in members for m in g.members) >= g.quorum.read for g in self.groups)

    def newest(self, records: Mapping[str, Record]) -> Record:
        """The one that counts: of the first group, where there are two, for all that was agreed is there; what the new keepers
        have from an earlier time is nothing."""
        return max((r for m, r in records.items() if m in self.groups[0].members), key=lambda r: r.accepted)


def no_quorum_error(
    path: str, replica_set: ReplicaSet, is_write: bool, answers: Mapping[str, RegisterAnswer], errors: Mapping[str, StoreError]
) -> Unavailable:
    """The error of the first group that has no quorum."""
    have = {m for m, a in answers.items() if isinstance(a, Record)}
    needed = {g: g.quorum.write if is_write else g.quorum.read for g in replica_set.groups}
    group = next(g for g in replica_set.groups if len(have.intersection(g.members)) < needed[g])
    reasons = [f"{m}: {a.reason}" for m, a in answers.items() if m in group.members and isinstance(a, DamagedRecord)]
    reasons += [f"{m}: {e}" for m, e in errors.items() if m in group.members]
    return Unavailable(
        f"can't {'change' if is_write else 'read'} {path}: {len(have.intersection(group.members))} of the {len(group.members)} "
        f"members that keep its record answer, {needed[group]} are needed ({'; '.join(reasons)}); start the missing ones"
    )


def is_unanimous(got: Mapping[str, RegisterAnswer], is_quorum: Callable[[Collection[str]], bool]) -> bool:
    """Whether these answers to a read are enough, and all the same."""
    records = undamaged_records(got)
    return is_quorum(records) and len({r.accepted for r in records.values()}) == 1


def undamaged_records(got: Mapping[str, RegisterAnswer]) -> dict[str, Record]:
    """The answers that are no damaged ones."""
    return {m: a for m, a in got.items() if isinstance(a, Record)}


def promises_given(got: Mapping[str, RegisterAnswer], ballot: Ballot) -> dict[str, bool]:
    return {m: a.promised == ballot for m, a in got.items() if isinstance(a, Record)}


def is_decided(votes: Mapping[str, bool], replica_set: ReplicaSet) -> bool:
    """Whether no more votes need be waited for: a quorum is for it, or a higher ballot has stood in the way."""
    return replica_set.can_write({m for m, yes in votes.items() if yes}) or (
        replica_set.can_write(votes) and not all(votes.values())
    )
