"""One change of registers: what is asked, what is known of it so far, and what is proposed in its second phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckpt.aggregator.records.replica_set import ReplicaSet, undamaged_records
from ckpt.storage.base.errors import Outdated
from ckpt.storage.registers.base import Ballot, RegisterAnswer, RegisterValue, is_final

Decide = Callable[[str, RegisterValue | None], RegisterValue | None]
"""From the path and its value to the new value, or None to leave it. Asked again where others compete, and it must then
know a value that it made itself."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A change that members refused, because another fence number counts by now."""

    reason: Outdated
    may_be_taken: bool
    """Whether a member may have taken a part of it."""


@dataclass(slots=True)
class RegisterUpdate:
    """One change of some paths: what is asked, and what is known so far. Used by one thread."""

    decide: Decide
    expect_absent: bool = False
    required_number: int | None = None
    """The only fence number by which it may go."""
    on_all_members: bool = False
    """Whether every member that answers gets the value, not only a quorum."""
    found: dict[str, RegisterValue | None] = field(default_factory=dict)
    """The values of the paths that are done."""
    possibly_changed: set[str] = field(default_factory=set)
    """Paths whose new value a member may have."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A value for the second phase, and the members that have promised to take it."""

    value: RegisterValue
    promising: frozenset[str]


def keep_value(_: str, __: RegisterValue | None) -> RegisterValue | None:
    """Leaves what is there."""
    return None


def choose_values(
    replica_sets: Mapping[str, ReplicaSet], promises: Mapping[str, Mapping[str, RegisterAnswer]], ballot: Ballot,
    update: RegisterUpdate,
) -> tuple[dict[str, Proposal], list[str], Ballot]:  # fmt: skip
    """What to propose to members that answered the first phase; the paths to try again; the highest ballot of any of them."""
    proposals: dict[str, Proposal] = {}
    undecided: list[str] = []
    highest = ballot
    for path, replicas in replica_sets.items():
        records = undamaged_records(promises[path])
        if (settled := next((r for r in records.values() if is_final(r)), None)) is not None:
            update.found[path] = settled.value
            continue
        highest = max([highest, *(r.promised for r in records.values())])
        promising = {m: r for m, r in records.items() if r.promised == ballot}
        if not replicas.can_write(promising):
            undecided.append(path)
            continue
        newest = replicas.newest(promising).value
        new = update.decide(path, newest)
        if new is None:
            new = newest  # reported to nobody before a quorum has it
        if new is None:
            update.found[path] = None
        else:
            proposals[path] = Proposal(new, frozenset(promising))
    return proposals, undecided, highest
