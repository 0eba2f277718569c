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
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt.aggregator.fanout import FanOut
from ckpt.aggregator.redundancy import Quorum
from ckpt.storage.errors import StoreError, Unavailable
from ckpt.storage.failpoints import failpoint
from ckpt.storage.registers import NONE, Answer, Ballot, Change, Damaged, Record, Registers, Value

log = logging.getLogger("ckpt")

T = TypeVar("T")

Known = Mapping[str, Mapping[str, Answer]]
"""Answers by path and member."""

Decide = Callable[[str, Value | None], Value | None]
"""From the path and its value to the new value, or None to leave it. Asked again where others compete, and it must then
know a value that it made itself."""

_BATCH = 1_000

_PATIENCE_SECONDS = 0.5
"""How long a read waits for the members that it needs before it asks the others as well."""


@dataclass(frozen=True, slots=True)
class Keepers:
    """The members that keep the register of a path."""

    members: tuple[str, ...]
    quorum: Quorum


class Ledger:
    """The values of paths."""

    def __init__(
        self, registers: Mapping[str, Registers], keepers: Callable[[str], Keepers], fan_out: FanOut, seconds: float = 30.0
    ) -> None:
        self._registers = registers
        self._keepers = keepers
        self._fan_out = fan_out
        self._seconds = seconds
        self._me = secrets.token_hex(8)
        self._proposals = itertools.count()

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, paths: Sequence[str]) -> dict[str, Value | None]:
        """The value of each path; Unavailable where too few of its members answer."""
        found: dict[str, Value | None] = {}
        unsettled: list[str] = []
        for batch in _batches(paths):
            keepers = {path: self._keepers(path) for path in batch}

            def enough(path: str, got: Mapping[str, Answer], keepers: Mapping[str, Keepers] = keepers) -> bool:
                return _agreed(keepers[path], got)

            # As many as must agree, those that answer; the others only if these do not.
            few = {path: self._likely(kept) for path, kept in keepers.items()}
            answers, errors = self._ask(few, lambda registers, names: registers.read(names), enough, _PATIENCE_SECONDS)
            open_ones = [path for path in batch if not enough(path, answers[path])]
            if open_ones:
                rest = {path: [m for m in keepers[path].members if m not in answers[path]] for path in open_ones}

                def enough_now(path: str, got: Mapping[str, Answer], known: Known = answers) -> bool:
                    return enough(path, {**known[path], **got})

                more, failed = self._ask(rest, lambda registers, names: registers.read(names), enough_now)
                for path in open_ones:
                    answers[path] |= more[path]
                errors |= failed
            for path in batch:
                records = [a for a in answers[path].values() if isinstance(a, Record)]
                self._require(path, keepers[path].quorum.read, len(records), answers[path], errors, "read")
                newest = max(records, key=lambda r: r.accepted)
                same = sum(r.accepted == newest.accepted for r in records)
                if same < keepers[path].quorum.read and newest.value is not None:
                    unsettled.append(path)
                found[path] = newest.value
        if unsettled:  # a change was left half-done: first the newest value is made the one for all
            found |= self._in_two_phases(unsettled, lambda _, value: None)
        return found

    def settle(self, paths: Sequence[str]) -> None:
        """Give every member that answers the newest value of these paths."""
        for batch in _batches(paths):
            self._in_two_phases(list(batch), lambda _, value: None, everywhere=True)

    # --- changing ----------------------------------------------------------------------------------------------

    def update(self, paths: Sequence[str], decide: Decide, fresh: bool = False) -> dict[str, Value | None]:
        """Change the values of paths; what each is after that. fresh: nothing is expected to be there yet."""
        found: dict[str, Value | None] = {}
        for batch in _batches(paths):
            left = self._directly(batch, decide, fresh, found)
            if left:
                found |= self._in_two_phases(left, decide)
        return found

    def _directly(self, paths: Sequence[str], decide: Decide, fresh: bool, found: dict[str, Value | None]) -> list[str]:
        """The paths that could not be changed so."""
        every = {path: self._keepers(path) for path in paths}
        keepers = {path: kept for path, kept in every.items() if not self._fan_out.health.down(kept.members[0])}
        left = [path for path in paths if path not in keepers]
        paths = list(keepers)
        seen: dict[str, dict[str, Answer]] = {path: {} for path in paths}
        if not fresh:
            seen, _ = self._ask(
                {path: (kept.members[:1]) for path, kept in keepers.items()}, lambda registers, names: registers.read(names)
            )
        changes: dict[str, Change] = {}
        for path in paths:
            record = Record() if fresh else seen[path].get(keepers[path].members[0])
            if not isinstance(record, Record):
                left.append(path)
                continue
            new = decide(path, record.value)
            if new is None:  # to be sure, for the first member may not know the newest
                left.append(path)
                continue
            changes[path] = Change(path, record.accepted, new)

        def change(registers: Registers, names: list[str]) -> list[bool]:
            return registers.change([changes[name] for name in names], self._me)

        failpoint("ledger.change")
        firsts, _ = self._ask({path: keepers[path].members[:1] for path in changes}, change)
        left += [path for path in changes if True not in firsts[path].values()]
        passed = {path: keepers[path] for path in changes if True in firsts[path].values()}
        failpoint("ledger.changed")

        def enough(path: str, got: Mapping[str, bool]) -> bool:
            return 1 + sum(got.values()) >= passed[path].quorum.write

        others, _ = self._ask({path: kept.members[1:] for path, kept in passed.items()}, change, enough)
        for path in passed:
            if enough(path, others[path]):
                found[path] = changes[path].value
            else:
                left.append(path)
        return left

    def _in_two_phases(self, paths: list[str], decide: Decide, everywhere: bool = False) -> dict[str, Value | None]:
        until = time.monotonic() + self._seconds
        found: dict[str, Value | None] = {}
        highest = NONE
        pause, tries = 0.005, 0
        while paths:
            # Never twice the same: two proposals of one ballot could both be accepted somewhere.
            ballot = Ballot(highest.round + 1, f"{self._me}{next(self._proposals):x}")
            paths, highest = self._round(paths, decide, ballot, found, everywhere)
            tries += 1
            if paths and tries > 4 and time.monotonic() > until:
                raise Unavailable(
                    f"{_named(paths)}: others changed it at the same time for {self._seconds:g} s; try again"
                )
            if paths:
                time.sleep(random.uniform(0, pause))
                pause = min(2 * pause, 0.5)
        return found

    def _round(
        self, paths: list[str], decide: Decide, ballot: Ballot, found: dict[str, Value | None], everywhere: bool
    ) -> tuple[list[str], Ballot]:
        """One try; the paths to try again, and the highest ballot that stood in the way."""
        keepers = {path: self._keepers(path) for path in paths}
        failpoint("ledger.prepare")
        promises, errors = self._ask(
            _members(keepers),
            lambda registers, names: registers.prepare(names, ballot),
            lambda path, got: not everywhere and _settled(_promises(got, ballot), keepers[path].quorum.write),
        )
        again: list[str] = []
        highest = ballot
        values: dict[str, Value] = {}
        promised: dict[str, set[str]] = {}
        for path in paths:
            records = {m: r for m, r in promises[path].items() if isinstance(r, Record)}
            self._require(path, keepers[path].quorum.write, len(records), promises[path], errors, "change")
            highest = max([highest, *(r.promised for r in records.values())])
            good = {m: r for m, r in records.items() if r.promised == ballot}
            if len(good) < keepers[path].quorum.write:
                again.append(path)
                continue
            newest = max(good.values(), key=lambda r: r.accepted)
            new = decide(path, newest.value)
            if new is None:
                if newest.value is None:
                    found[path] = None
                    continue
                new = newest.value  # told to nobody before a quorum has it
            values[path] = new
            promised[path] = set(good)
        failpoint("ledger.accept")
        accepted, _ = self._ask(
            {path: keepers[path].members for path in values},
            lambda registers, names: registers.accept([(name, values[name]) for name in names], ballot),
            lambda path, got: (
                not everywhere
                # A damaged register says no whatever the ballot.
                and _settled([yes for m, yes in got.items() if yes or m in promised[path]], keepers[path].quorum.write)
            ),
        )
        failpoint("ledger.accepted")
        for path, value in values.items():
            if sum(a is True for a in accepted[path].values()) >= keepers[path].quorum.write:
                found[path] = value
                self._heal(path, value, ballot, promises[path])
            else:
                again.append(path)
        return again, highest

    def _heal(self, path: str, value: Value, ballot: Ballot, answers: Mapping[str, Answer]) -> None:
        """Put the value in the place of damaged records: a quorum of the other members has promised and taken it."""
        for member, answer in answers.items():
            if isinstance(answer, Damaged):
                try:
                    self._registers[member].accept([(path, value)], ballot, heal=True)
                    log.warning("the record of %s on %s was damaged (%s) and is restored", path, member, answer.reason)
                except StoreError as error:
                    log.info("the damaged record of %s on %s stays: %s", path, member, error)

    def _likely(self, kept: Keepers) -> Sequence[str]:
        """As many members as a read needs, those that answered lately first."""
        return sorted(kept.members, key=self._fan_out.health.down)[: kept.quorum.read]

    # --- asking ------------------------------------------------------------------------------------------------

    def _ask(
        self, members: Mapping[str, Sequence[str]], call: Callable[[Registers, list[str]], Sequence[T]],
        enough: Callable[[str, Mapping[str, T]], bool] | None = None, patience: float | None = None,
    ) -> tuple[dict[str, dict[str, T]], dict[str, StoreError]]:  # fmt: skip
        """Ask every member for all of its paths at once: the answers by path and member, and the errors by member.

        patience: seconds after which those are given that are there.
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

        def all_enough(answers: dict[str, Sequence[T]]) -> bool:
            return enough is not None and all(enough(path, got) for path, got in by_path(answers).items())

        calls = {m: functools.partial(call, self._registers[m], names[m]) for m in names}
        answers, errors = self._fan_out.ask(calls, patience or self._seconds, all_enough)
        return by_path(answers), errors

    def _require(
        self, path: str, needed: int, have: int, answers: Mapping[str, Answer], errors: Mapping[str, StoreError], doing: str
    ) -> None:
        if have >= needed:
            return
        members = self._keepers(path).members
        reasons = [f"{m}: {a.reason}" for m, a in answers.items() if isinstance(a, Damaged)]
        reasons += [f"{m}: {e}" for m, e in errors.items() if m in members]
        raise Unavailable(
            f"can't {doing} {path}: {have} of the {len(members)} members that keep its record answer, {needed} are needed "
            f"({'; '.join(reasons)}); start the missing ones"
        )


def _members(keepers: Mapping[str, Keepers]) -> dict[str, Sequence[str]]:
    return {path: kept.members for path, kept in keepers.items()}


def _agreed(keepers: Keepers, got: Mapping[str, Answer]) -> bool:
    """Whether these answers to a read are enough: so many, and all the same."""
    records = [a for a in got.values() if isinstance(a, Record)]
    return len(records) >= keepers.quorum.read and len({r.accepted for r in records}) == 1


def _promises(got: Mapping[str, Answer], ballot: Ballot) -> list[bool]:
    return [a.promised == ballot for a in got.values() if isinstance(a, Record)]


def _settled(votes: Sequence[bool], needed: int) -> bool:
    """Whether no more votes need be waited for: a quorum is for it, or a higher ballot has stood in the way."""
    return sum(votes) >= needed or (len(votes) >= needed and not all(votes))


def _batches(paths: Sequence[str]) -> list[Sequence[str]]:
    return [paths[i : i + _BATCH] for i in range(0, len(paths), _BATCH)]


def _named(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
