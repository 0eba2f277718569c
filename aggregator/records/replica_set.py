"""The replica set of a register, and whether the answers of some of its members are a quorum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.aggregator.placement.redundancy import Quorum
from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.registers.base import NO_BALLOT, Ballot, DamagedRegister, Register, RegisterAnswer


class QuorumDamaged(Unavailable):
    """Enough members answer, but too few of them have the record of a path undamaged."""


@dataclass(frozen=True, slots=True)
class VotingGroup:
    """The members that keep the register of a path under one record ring, and their quorum."""

    members: tuple[str, ...]
    quorum: Quorum

    def can_write(self, members: Collection[str]) -> bool:
        """Return whether these members are a quorum for a change in this group."""
        return sum(m in members for m in self.members) >= self.quorum.write

    def can_read(self, members: Collection[str]) -> bool:
        """Return whether these members are a quorum for a read in this group."""
        return sum(m in members for m in self.members) >= self.quorum.read


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The voting groups of a path: one, or two while its record moves. Each change is agreed in every group."""

    groups: tuple[VotingGroup, ...]
    fence_number: int = 0
    """The fence number of the record ring that defines the groups."""

    @property
    def members(self) -> tuple[str, ...]:
        """The members of all groups, each once."""
        if len(self.groups) == 1:
            return self.groups[0].members
        return tuple(dict.fromkeys(m for group in self.groups for m in group.members))

    def can_write(self, members: Collection[str]) -> bool:
        """Return whether these members are a quorum for a change."""
        return all(group.can_write(members) for group in self.groups)

    def can_read(self, members: Collection[str]) -> bool:
        """Return whether these members are a quorum for a read."""
        return all(group.can_read(members) for group in self.groups)

    def can_agree(self, promising: Collection[str], damaged: Collection[str]) -> bool:
        """Return whether promising members may agree on a value, if members whose records are damaged then accept it, too.

        Each quorum has one of the promising members then. So they know each agreed value, and an earlier proposer, who relies
        on a promise that was lost with a record, is refused by one of them. Of two members, one is enough. If no record is
        damaged, this is `can_write`.
        """
        return self.can_read(promising) and self.can_write({*promising, *damaged})

    def must_find(self, members: Collection[str]) -> bool:
        """Return whether every later read or change finds a value that these members have accepted, or a newer one.

        While the record moves, a quorum of the first group is enough, see `newest`. One of the second group is not.
        """
        return self.groups[0].can_write(members)

    def newest(self, records: Mapping[str, Register]) -> Register:
        """Return the newest record of the first group.

        The first group has everything that was agreed. Records that members of the second group have from before are outdated.
        """
        return max((r for m, r in records.items() if m in self.groups[0].members), key=lambda r: r.accepted_ballot)


def preferred_members(replicas: ReplicaSet, is_down: Callable[[str], bool]) -> list[str]:
    """Return as many members as a change needs, or at least as a read needs; members that are not down come first."""
    found: dict[str, None] = {}
    for group in replicas.groups:
        down = [m for m in group.members if is_down(m)]
        up = [m for m in group.members if m not in down][: group.quorum.write]
        found |= dict.fromkeys([*up, *down][: max(len(up), group.quorum.read)])
    return list(found)


def no_quorum_error(
    path: str,
    replica_set: ReplicaSet,
    answers: Mapping[str, RegisterAnswer],
    errors: Mapping[str, StoreError],
    *,
    is_write: bool,
) -> Unavailable:
    """Return the error for the first group that has no quorum: QuorumDamaged if enough of its members answer.

    answers, errors: by member.
    """
    voting = {m for m, a in answers.items() if isinstance(a, Register)}
    needed = {g: g.quorum.write if is_write else g.quorum.read for g in replica_set.groups}
    group = next(g for g in replica_set.groups if len(voting.intersection(g.members)) < needed[g])
    reasons = [f"{m}: {a.reason}" for m, a in answers.items() if m in group.members and isinstance(a, DamagedRegister)]
    reasons += [f"{m}: {e}" for m, e in errors.items() if m in group.members]
    kind = QuorumDamaged if len(answers.keys() & set(group.members)) >= needed[group] else Unavailable
    return kind(
        f"can't {'change' if is_write else 'read'} {path}: {len(voting.intersection(group.members))} of the "
        f"{len(group.members)} members that keep its record answer, {needed[group]} are needed ({'; '.join(reasons)}); "
        "start the missing ones"
    )


def not_accepted_error(paths: Sequence[str], seconds: float, errors: Mapping[str, StoreError]) -> Unavailable:
    """Return the error for values that no quorum has accepted within some seconds. errors: of the last attempt, by member."""
    what = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    reasons = "; ".join(f"{member}: {error}" for member, error in errors.items())
    return Unavailable(f"{what} was not changed within {seconds:g} s: {reasons or 'other clients change it, too'}; try again")


def is_unanimous(got: Mapping[str, RegisterAnswer], is_quorum: Callable[[Collection[str]], bool]) -> bool:
    """Return whether these answers to a read are a quorum and all the same."""
    records = undamaged_records(got)
    return is_quorum(records) and len({r.accepted_ballot for r in records.values()}) == 1


def ballots_by_name(scanned: Mapping[str, Iterable[tuple[str, RegisterAnswer]]]) -> dict[str, dict[str, Ballot | None]]:
    """Return the ballot of each register's value by name and member, None for a damaged record. scanned: listings by member."""
    found: dict[str, dict[str, Ballot | None]] = defaultdict(dict)
    for member, listed in scanned.items():
        for name, record in listed:
            found[name][member] = record.accepted_ballot if isinstance(record, Register) else None
    return found


def is_lagging(replicas: ReplicaSet, ballots: Mapping[str, Ballot | None], answering: Collection[str]) -> bool:
    """Return whether the answering members of a replica set have different values, or one has a damaged record.

    A register without a value, which may have promised a ballot, is the same as a missing one: nothing can be settled.
    """
    found = {ballots.get(m, NO_BALLOT) for m in replicas.members if m in answering}
    return len(found) > 1 or None in found


def undamaged_records(got: Mapping[str, RegisterAnswer]) -> dict[str, Register]:
    """Return the answers that are not damaged records, by member."""
    return {m: a for m, a in got.items() if isinstance(a, Register)}


def damaged_members(got: Mapping[str, RegisterAnswer]) -> set[str]:
    """Return the members whose answers are damaged records."""
    return {m for m, a in got.items() if isinstance(a, DamagedRegister)}


def promises_given(got: Mapping[str, RegisterAnswer], ballot: Ballot) -> dict[str, bool]:
    """Return whether each member with an undamaged record has promised this ballot."""
    return {m: a.promised_ballot == ballot for m, a in got.items() if isinstance(a, Register)}


def is_decided(votes: Mapping[str, bool], replica_set: ReplicaSet) -> bool:
    """Return whether no more votes are needed: a quorum has agreed, or a quorum has voted and a member of it refused."""
    return replica_set.can_write({m for m, yes in votes.items() if yes}) or (
        replica_set.can_write(votes) and not all(votes.values())
    )
