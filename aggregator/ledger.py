"""One value for each path, agreed by a majority of the members that keep it, whatever fails and whoever competes.

Each path has a register on a few members; `storage/registers.py` has the rules that a register keeps. A change is made in
one of two ways:

* *direct*: the first member of the path changes its value, if that is still the one that was read, and then the others do the
  same. Done once a quorum has it. One write on each member; this is the way of nearly every change.
* *in two phases* (Paxos): a promise from a quorum, which brings the newest value that any of it holds; then the value
  made from that is accepted by a quorum. This works while any quorum answers, and settles what a direct change left
  half-done: its value is taken over or given up, the same for all.

Why they fit together. The first member lets one direct change of a value pass, so that two never compete. A direct ballot lies
right above the one that it replaces and below every later two-phase ballot, and a register that has promised a two-phase
ballot takes no direct change of what its proposer may have read. So a direct change that a quorum has taken is seen by every
later promise of a quorum, as the newest value or as the root of that; one that fewer have taken is a value whose author
still waits, and finds out in two phases whether it stands.

While the members that keep records change (`aggregator/succession.py`), a path has two groups of members: what is agreed
must be agreed in both, in two phases.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt.aggregator.fanout import FanOut
from ckpt.aggregator.redundancy import Quorum
from ckpt.storage.errors import Outdated, StoreError, Unavailable
from ckpt.storage.failpoints import failpoint
from ckpt.storage.registers import (
    NONE,
    UNKNOWN,
    Answer,
    Ballot,
    Change,
    Damaged,
    Record,
    Registers,
    Value,
    floor,
    is_final,
)

log = logging.getLogger("ckpt")

T = TypeVar("T")

Decide = Callable[[str, Value | None], Value | None]
"""From the path and its value to the new value, or None to leave it. Asked again where others compete, and it must then
know a value that it made itself."""

_BATCH = 1_000

_PATIENCE_SECONDS = 0.5
"""How long a read waits for the members that it needs before it asks the others as well."""

_CHANGE_SECONDS = 2.0
"""How long a direct change waits for the first member before the others agree without it; longer for many paths."""


@dataclass(frozen=True, slots=True)
class Group:
    """Members that keep the register of a path, and how many of them decide."""

    members: tuple[str, ...]
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Keepers:
    """The groups of a path: one, or while its record moves two. What is agreed is agreed in each."""

    groups: tuple[Group, ...]
    epoch: int = 0
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


class Ledger:
    """The values of paths.

    keepers: who keeps these paths, all by one ring. renew: called where they say that it is others. direct: whether all
    callers agree on who the first member of a path is.
    """

    def __init__(
        self, registers: Mapping[str, Registers], keepers: Callable[[Sequence[str]], dict[str, Keepers]], fan_out: FanOut,
        seconds: float = 30.0, renew: Callable[[], None] = lambda: None, direct: bool = True,
    ) -> None:  # fmt: skip
        self._registers = registers
        self._keepers = keepers
        self._fan_out = fan_out
        self._seconds = seconds
        self._renew = renew
        self._direct = direct
        self._secret = secrets.token_hex(8)
        self._proposals = itertools.count()

    @property
    def _me(self) -> str:
        """Of this process alone: a child has another, whatever it has from its parent."""
        return f"{self._secret}{os.getpid():x}x"

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, paths: Sequence[str]) -> dict[str, Value | None]:
        """The value of each path; Unavailable where too few of its members answer."""
        found: dict[str, Value | None] = {}
        for batch in _batches(paths):
            found |= self.lately(functools.partial(self._read, batch))
        return found

    def _read(self, paths: Sequence[str]) -> dict[str, Value | None]:
        keepers = self._keepers(paths)
        epoch = _epoch(keepers)

        def read(registers: Registers, names: list[str]) -> list[Answer]:
            return registers.read(names, epoch)

        def enough(path: str, got: Mapping[str, Answer]) -> bool:
            return _agreed(got, keepers[path].can_write)

        # As many as a change needs, of those that answer; the others only if these are too few to read, or do not agree.
        few = {path: self._likely(kept) for path, kept in keepers.items()}
        answers, errors = self._ask(few, read, enough, _PATIENCE_SECONDS)
        open_ones = [path for path in paths if not _agreed(answers[path], keepers[path].can_read)]
        if open_ones:
            rest = {path: [m for m in keepers[path].members if m not in answers[path]] for path in open_ones}
            more, failed = self._ask(
                rest, read, lambda path, got: enough(path, {**answers[path], **got}),
                will_do=lambda path, got: keepers[path].can_read(_records({**answers[path], **got})),  # or two phases settle it
            )  # fmt: skip
            for path in open_ones:
                answers[path] |= more[path]
            errors |= failed
        found: dict[str, Value | None] = {}
        unsettled: list[str] = []
        for path in paths:
            records = _records(answers[path])
            if not keepers[path].can_read(records):
                raise _too_few(path, keepers[path], False, answers[path], errors)
            newest = keepers[path].newest(records)
            same = {m for m, r in records.items() if r.accepted == newest.accepted}
            # One of two that is left alone can't settle anything. What it has may be half-done: later it may not be seen for a
            # while, but never is it undone.
            kept = keepers[path]
            agreed = kept.can_write(same) or (kept.can_read(same) and not kept.can_write(records))
            if not agreed and newest.value is not None:
                unsettled.append(path)
            found[path] = newest.value
        if unsettled:  # a change was left half-done: first the newest value is made the one for all
            found |= self._in_two_phases(unsettled, lambda _, value: None)
        return found

    def settle(self, paths: Sequence[str], everywhere: bool = True) -> None:
        """Give a quorum, or every member that answers, the newest value of these paths."""
        for batch in _batches(paths):
            self.lately(functools.partial(self._in_two_phases, batch, lambda _, value: None, everywhere))

    def lately(self, work: Callable[[], T]) -> T:
        """Do some work, again where it went by an old ring."""
        until = time.monotonic() + 2 * self._seconds
        while True:
            try:
                return work()
            except Outdated as error:
                if time.monotonic() > until:
                    raise Unavailable(f"{error}; they still change, or this process can't learn of it") from error
                self._renew()
                time.sleep(0.02)

    # --- changing ----------------------------------------------------------------------------------------------

    def update(self, paths: Sequence[str], decide: Decide, fresh: bool = False) -> dict[str, Value | None]:
        """Change the values of paths; what each is after that. fresh: nothing is expected to be there yet."""
        found: dict[str, Value | None] = {}
        for batch in _batches(paths):
            found |= self.lately(functools.partial(self._update, batch, decide, fresh))
        return found

    def update_by(self, number: int, paths: Sequence[str], decide: Decide, fresh: bool = False) -> dict[str, Value | None]:
        """As `update`, by this fence number and no other. Raises Outdated, which says whether a member may have taken the
        change: once another number counts, what the new values refer to may be gone."""
        found: dict[str, Value | None] = {}
        for batch in _batches(paths):
            found |= self._update(batch, decide, fresh, number)
        return found

    def _update(self, paths: Sequence[str], decide: Decide, fresh: bool, number: int | None = None) -> dict[str, Value | None]:
        found: dict[str, Value | None] = {}
        sent: set[str] = set()
        try:
            left = self._directly(paths, decide, fresh, found, number, sent) if self._direct else paths
            return found | self._in_two_phases(left, decide, False, number, sent) if left else found
        except Outdated as error:
            error.unsettled = bool(sent)
            raise

    def _kept(self, paths: Sequence[str], number: int | None) -> dict[str, Keepers]:
        keepers = self._keepers(paths)
        if number is not None and _epoch(keepers) != number:
            raise Outdated(f"members go by {_epoch(keepers)} now, and not by {number}")
        return keepers

    def _directly(
        self, paths: Sequence[str], decide: Decide, fresh: bool, found: dict[str, Value | None], number: int | None,
        sent: set[str],
    ) -> list[str]:  # fmt: skip
        """The paths that could not be changed so. sent: gets those whose new value a member may have."""
        every = self._kept(paths, number)
        epoch = _epoch(every)
        keepers = {
            path: kept
            for path, kept in every.items()
            if len(kept.groups) == 1 and not self._fan_out.health.down(kept.members[0])
        }
        left = [path for path in paths if path not in keepers]
        paths = list(keepers)
        patience = min(self._seconds, _CHANGE_SECONDS * (1 + len(paths) / 50))
        seen: dict[str, dict[str, Answer]] = {path: {} for path in paths}
        if not fresh:
            firsts = {path: kept.members[:1] for path, kept in keepers.items()}
            seen, _ = self._ask(firsts, lambda registers, names: registers.read(names, epoch), patience=patience)
        changes: dict[str, Change] = {}
        for path in paths:
            record = Record() if fresh else seen[path].get(keepers[path].members[0])
            if not isinstance(record, Record):
                left.append(path)
                continue
            new = decide(path, record.value)
            # None: to be sure, for the first member may not know the newest. Nothing there, in a ring that is not the first: a
            # member may hold a first value that it took by an earlier ring, whose first member was another, and nobody else.
            if new is None or (record.accepted == NONE and epoch > 1):
                left.append(path)
                continue
            changes[path] = Change(path, record.accepted, new)

        def change(registers: Registers, names: list[str]) -> list[bool]:
            return registers.change([changes[name] for name in names], self._me, epoch)

        if len({keepers[path].members[0] for path in changes}) > 1:  # one may take its part where another refuses
            sent.update(changes)
        failpoint("ledger.change")
        took, _ = self._ask({path: keepers[path].members[:1] for path in changes}, change, patience=patience)
        sent.update(path for path in changes if False not in took[path].values())
        left += [path for path in changes if True not in took[path].values()]
        passed = {path: keepers[path] for path in changes if True in took[path].values()}
        failpoint("ledger.changed")

        def enough(path: str, got: Mapping[str, bool]) -> bool:
            return passed[path].can_write({passed[path].members[0], *(m for m, yes in got.items() if yes)})

        others, _ = self._ask({path: kept.members[1:] for path, kept in passed.items()}, change, enough)
        for path in passed:
            if enough(path, others[path]):
                found[path] = changes[path].value
            else:
                left.append(path)
        return left

    def _in_two_phases(
        self, paths: Sequence[str], decide: Decide, everywhere: bool = False, number: int | None = None,
        sent: set[str] | None = None,
    ) -> dict[str, Value | None]:  # fmt: skip
        until = time.monotonic() + self._seconds
        found: dict[str, Value | None] = {}
        highest = floor(_epoch(self._keepers(paths)))
        pause, tries = 0.005, 0
        sent = set() if sent is None else sent
        while paths:
            # Never twice the same: two proposals of one ballot could both be accepted somewhere.
            ballot = Ballot(highest.round + 1, f"{self._me}{next(self._proposals):x}")
            paths, highest = self._round(paths, decide, ballot, found, everywhere, number, sent)
            tries += 1
            if paths and tries > 4 and time.monotonic() > until:
                raise Unavailable(f"{_named(paths)}: others changed it at the same time for {self._seconds:g} s; try again")
            if paths:
                time.sleep(random.uniform(0, pause))
                pause = min(2 * pause, 0.5)
        return found

    def _round(
        self, paths: Sequence[str], decide: Decide, ballot: Ballot, found: dict[str, Value | None], everywhere: bool,
        number: int | None, sent: set[str],
    ) -> tuple[list[str], Ballot]:  # fmt: skip
        """One try; the paths to try again, and the highest ballot that stood in the way."""
        keepers = self._kept(paths, number)
        epoch = _epoch(keepers)
        failpoint("ledger.prepare")
        promises, errors = self._ask(
            {path: kept.members for path, kept in keepers.items()},
            lambda registers, names: registers.prepare(names, ballot, epoch),
            lambda path, got: not everywhere and _settled(_promises(got, ballot), keepers[path]),
        )
        again: list[str] = []
        highest = ballot
        values: dict[str, Value] = {}
        promised: dict[str, set[str]] = {}
        for path in paths:
            records = {m: r for m, r in promises[path].items() if isinstance(r, Record)}
            if not keepers[path].can_write(records):
                raise _too_few(path, keepers[path], True, promises[path], errors)
            if (settled := next((r for r in records.values() if is_final(r)), None)) is not None:
                found[path] = settled.value
                continue
            highest = max([highest, *(r.promised for r in records.values())])
            good = {m: r for m, r in records.items() if r.promised == ballot}
            if not keepers[path].can_write(good):
                again.append(path)
                continue
            newest = keepers[path].newest(good)
            new = decide(path, newest.value)
            if new is None:
                if newest.value is None:
                    found[path] = None
                    continue
                new = newest.value  # told to nobody before a quorum has it
            values[path] = new
            promised[path] = set(good)
        sent.update(values)
        failpoint("ledger.accept")
        accepted, _ = self._ask(
            {path: keepers[path].members for path in values},
            lambda registers, names: registers.accept([(name, values[name]) for name in names], ballot, epoch=epoch),
            lambda path, got: (
                not everywhere
                # A damaged register says no whatever the ballot.
                and _settled({m: yes for m, yes in got.items() if yes or m in promised[path]}, keepers[path])
            ),
        )
        failpoint("ledger.accepted")
        for path, value in values.items():
            if keepers[path].can_write({m for m, yes in accepted[path].items() if yes}):
                found[path] = value
                self._heal(path, value, ballot, promises[path], epoch)
            else:
                again.append(path)
        return again, highest

    def _heal(self, path: str, value: Value, ballot: Ballot, answers: Mapping[str, Answer], epoch: int) -> None:
        """Put the value in the place of damaged records: a quorum of the other members has promised and taken it."""
        for member, answer in answers.items():
            if isinstance(answer, Damaged):
                try:
                    self._registers[member].accept([(path, value)], ballot, heal=True, epoch=epoch)
                    level = logging.INFO if answer == UNKNOWN else logging.WARNING  # one for each file there is
                    log.log(level, "the record of %s on %s was damaged (%s) and is restored", path, member, answer.reason)
                except StoreError as error:
                    log.info("the damaged record of %s on %s stays: %s", path, member, error)

    def _likely(self, kept: Keepers) -> Sequence[str]:
        """As many members as a change needs, or at least a read, those that answered lately first."""
        found: dict[str, None] = {}
        for group in kept.groups:
            down = [m for m in group.members if self._fan_out.health.down(m)]
            up = [m for m in group.members if m not in down][: group.quorum.write]
            found |= dict.fromkeys([*up, *down][: max(len(up), group.quorum.read)])
        return list(found)

    # --- asking ------------------------------------------------------------------------------------------------

    def _ask(
        self, members: Mapping[str, Sequence[str]], call: Callable[[Registers, list[str]], Sequence[T]],
        enough: Callable[[str, Mapping[str, T]], bool] | None = None, patience: float | None = None,
        will_do: Callable[[str, Mapping[str, T]], bool] | None = None,
    ) -> tuple[dict[str, dict[str, T]], dict[str, StoreError]]:  # fmt: skip
        """Ask every member for all of its paths at once: the answers by path and member, and the errors by member.

        patience: seconds after which those are given that are there. will_do: of a path, whether it could go on with these.
        """
        names: dict[str, list[str]] = defaultdict(list)
        for path, kept in members.items():
            for member in kept:
                names[member].append(path)

        def by_path(answers: Mapping[str, Sequence[T]]) -> dict[str, dict[str, T]]:
            found: dict[str, dict[str, T]] = {path: {} for path in members}
            for member, given in answers.items():
                for path, answer in zip(names[member], given, strict=True):
                    found[path][member] = answer
            return found

        def of_all(
            found: Callable[[str, Mapping[str, T]], bool] | None,
        ) -> Callable[[dict[str, Sequence[T]]], bool]:
            return lambda answers: found is not None and all(found(path, got) for path, got in by_path(answers).items())

        calls = {m: functools.partial(call, self._registers[m], names[m]) for m in names}
        answers, errors = self._fan_out.ask(calls, patience or self._seconds, of_all(enough), will_do=of_all(will_do))
        for error in errors.values():
            if isinstance(error, Outdated):
                raise error
        return by_path(answers), errors


def _epoch(keepers: Mapping[str, Keepers]) -> int:
    return next((kept.epoch for kept in keepers.values()), 0)


def _too_few(
    path: str, keepers: Keepers, writing: bool, answers: Mapping[str, Answer], errors: Mapping[str, StoreError]
) -> Unavailable:
    """The error of the first group that has no quorum."""
    have = {m for m, a in answers.items() if isinstance(a, Record)}
    needed = {g: g.quorum.write if writing else g.quorum.read for g in keepers.groups}
    group = next(g for g in keepers.groups if len(have.intersection(g.members)) < needed[g])
    reasons = [f"{m}: {a.reason}" for m, a in answers.items() if m in group.members and isinstance(a, Damaged)]
    reasons += [f"{m}: {e}" for m, e in errors.items() if m in group.members]
    return Unavailable(
        f"can't {'change' if writing else 'read'} {path}: {len(have.intersection(group.members))} of the {len(group.members)} "
        f"members that keep its record answer, {needed[group]} are needed ({'; '.join(reasons)}); start the missing ones"
    )


def _agreed(got: Mapping[str, Answer], enough: Callable[[Collection[str]], bool]) -> bool:
    """Whether these answers to a read are enough, and all the same."""
    records = _records(got)
    return enough(records) and len({r.accepted for r in records.values()}) == 1


def _records(got: Mapping[str, Answer]) -> dict[str, Record]:
    """The answers that are no damaged ones."""
    return {m: a for m, a in got.items() if isinstance(a, Record)}


def _promises(got: Mapping[str, Answer], ballot: Ballot) -> dict[str, bool]:
    return {m: a.promised == ballot for m, a in got.items() if isinstance(a, Record)}


def _settled(votes: Mapping[str, bool], keepers: Keepers) -> bool:
    """Whether no more votes need be waited for: a quorum is for it, or a higher ballot has stood in the way."""
    return keepers.can_write({m for m, yes in votes.items() if yes}) or (keepers.can_write(votes) and not all(votes.values()))


def _batches(paths: Sequence[str]) -> list[Sequence[str]]:
    return [paths[i : i + _BATCH] for i in range(0, len(paths), _BATCH)]


def _named(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
