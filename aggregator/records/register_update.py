"""The state of one change of registers, and the choice of the values that its second phase proposes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ckpt.aggregator.records.replica_set import ReplicaSet, damaged_members, undamaged_records
from ckpt.storage.base.errors import Outdated, StoreError
from ckpt.storage.registers.base import Ballot, RegisterAnswer, RegisterValue, is_final

Decide = Callable[[str, RegisterValue | None], RegisterValue | None]
"""A function from a path and its value to the new value, or None to keep the value.

It is called again where others compete. It must then recognise a value that it made itself.
"""

OnRefused = Callable[[Collection[str]], None]
"""Called with the paths whose direct change the first member refused: no member has accepted what was proposed for them."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """The result of a change that members refused, because they have another fence number now."""

    reason: Outdated
    may_be_accepted: bool
    """Whether a member may have accepted a part of the change."""


@dataclass(slots=True)
class RegisterUpdate:
    """The request and the state of one change of some paths. Used by one thread."""

    decide: Decide
    expect_absent: bool = False
    """Whether the paths are expected to have no value, so that no read is needed first."""
    required_number: int | None = None
    """The only fence number that the change may use; None for the current one."""
    on_all_members: bool = False
    """Whether every member that answers gets the value, not only a quorum."""
    on_refused: OnRefused | None = None
    found: dict[str, RegisterValue | None] = field(default_factory=dict)
    """The values of the paths that are done."""
    possibly_accepted: dict[str, RegisterValue] = field(default_factory=dict)
    """By path, the last proposed value that a member may have accepted."""
    errors: dict[str, StoreError] = field(default_factory=dict)
    """By member, the errors of the last attempt to have a proposed value accepted."""

    def note_first_answers(self, values: Mapping[str, RegisterValue], answers: Mapping[str, Mapping[str, bool]]) -> None:
        """Note whether first members accepted direct changes. values, answers: by path, what was proposed and answered."""
        refused = {path for path in values if False in answers[path].values()}
        self.possibly_accepted.update({path: new for path, new in values.items() if path not in refused})
        if refused and self.on_refused is not None:
            self.on_refused(refused)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A value for the second phase, and the members that have promised its ballot."""

    value: RegisterValue
    promising: frozenset[str]


def keep_value(_: str, __: RegisterValue | None) -> RegisterValue | None:
    """Keep the value: a `Decide` that changes nothing."""
    return None


def choose_values(
    replica_sets: Mapping[str, ReplicaSet], promises: Mapping[str, Mapping[str, RegisterAnswer]], ballot: Ballot,
    update: RegisterUpdate,
) -> tuple[dict[str, Proposal], list[str], Ballot]:  # fmt: skip
    """Return the proposals for the second phase by path, the paths to try again, and the highest ballot of any answer.

    promises: the answers to the first phase, by path and member. A final value ends the change of its path.
    """
    proposals: dict[str, Proposal] = {}
    undecided: list[str] = []
    highest = ballot
    for path, replicas in replica_sets.items():
        records = undamaged_records(promises[path])
        if (final := next((r for r in records.values() if is_final(r)), None)) is not None:
            update.found[path] = final.value
            continue
        highest = max([highest, *(r.promised_ballot for r in records.values())])
        promising = {m: r for m, r in records.items() if r.promised_ballot == ballot}
        if not replicas.can_agree(promising, damaged_members(promises[path])):
            undecided.append(path)
            continue
        newest = replicas.newest(promising).value
        new = update.decide(path, newest)
        if new is None:
            new = newest  # propose it again: no caller may learn it before a quorum has it
        if new is None:  # a member may have accepted an earlier proposal, which others can complete
            new = update.possibly_accepted.get(path)
        if new is None:
            update.found[path] = None
        else:
            proposals[path] = Proposal(new, frozenset(promising))
    return proposals, undecided, highest
