"""The consensus on the value of each path, by Paxos among the members of its replica set and by direct changes.

Each path has a register on each member of its replica set; `storage/registers/base.py` has the rules of a register. A change is
made in one of two ways:

* *direct*: the first member of the replica set changes its value, if that is still the one that was read. Then the other
  members do the same. The change is done once a quorum has it. It costs one write per member; nearly all changes are direct.
* *in two phases* (Paxos): a quorum promises a ballot and returns its newest value. Then a quorum accepts the value that is made
  from that one. This works while any quorum answers. It also settles a direct change that was left half-done: all clients then
  agree either on its value or on the value before.

Why both are compatible. The first member lets only one direct change of a value pass, so two direct changes never compete. The
ballot of a direct change is right above the one that it replaces, and below every later two-phase ballot. A register that has
promised a two-phase ballot refuses a direct change of the value that it had then: the client of that ballot may have read it.
So each later quorum of promises returns a direct change that a quorum has accepted, or a value that was made from it. If too
few members accept a direct change, its client runs the two phases before it returns, to find out whether the change was agreed.

While the record ring changes (`aggregator/records/ring_change.py`), a path has two voting groups. Each change must be agreed in
both, in two phases.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.records.damaged_records import replace_damaged
from ckpt.aggregator.records.register_update import Decide, OnRefused, RegisterUpdate, Superseded, choose_values, keep_value
from ckpt.aggregator.records.replica_set import (
    ReplicaSet,
    damaged_members,
    is_decided,
    is_unanimous,
    no_quorum_error,
    not_accepted_error,
    preferred_members,
    promises_given,
    undamaged_records,
)
from ckpt.storage.base.errors import Outdated, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.registers.base import (
    Ballot,
    DirectChange,
    Register,
    RegisterAnswer,
    Registers,
    RegisterValue,
    can_propose_directly,
    floor_ballot,
)

T = TypeVar("T")

BATCH_PATHS = 1_000  # the most paths whose records one call reads or changes

_FIRST_READ_SECONDS = 0.5
"""How long a read waits for the members that it needs before it asks the others too."""

_CHANGE_SECONDS = 2.0
"""How long a direct change waits for the first member before the other members agree without it; longer for many paths."""

_MIN_TRIES = 5  # also after the deadline, because this client may have been stopped meanwhile


class ReplicatedRegisters:
    """The agreed values of paths, read and changed on their replica sets. Safe to use from many threads.

    registers: those of each member, by its name. replica_sets: returns the replica sets of paths, all of one record ring.
    deadline_seconds: how long one call of a member may take, and how long the two phases are tried again. invalidate_ring:
    called if members answer that the ring is outdated. is_direct: whether direct changes are allowed. They are safe only if all
    clients compute the same first member of each replica set.
    """

    def __init__(
        self,
        registers: Mapping[str, Registers],
        replica_sets: Callable[[Sequence[str]], dict[str, ReplicaSet]],
        fan_out: FanOut,
        deadline_seconds: float,
        invalidate_ring: Callable[[], None] = lambda: None,
        is_direct: bool = True,
    ) -> None:
        self._registers = registers
        self._replica_sets = replica_sets
        self._fan_out = fan_out
        self._deadline_seconds = deadline_seconds
        self._invalidate_ring = invalidate_ring
        self._is_direct = is_direct
        self._process_secret = secrets.token_hex(8)
        self._proposals = itertools.count()

    @property
    def _proposer_id(self) -> str:
        """The id of this process in ballots. A forked child has its own, although it copies the secret."""
        return f"{self._process_secret}{os.getpid():x}x"

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, paths: Sequence[str]) -> dict[str, RegisterValue | None]:
        """Return the value of each path. Raises Unavailable if too few members of its replica set answer."""
        found: dict[str, RegisterValue | None] = {}
        for batch in _batches(paths):
            found |= self.retry_outdated(functools.partial(self._read_batch, batch))
        return found

    def _read_batch(self, paths: Sequence[str]) -> dict[str, RegisterValue | None]:
        replica_sets = self._replica_sets(paths)
        fence_number = _fence_number(replica_sets)

        def read(registers: Registers, names: list[str]) -> list[RegisterAnswer]:
            return registers.read(names, fence_number)

        def enough(path: str, got: Mapping[str, RegisterAnswer]) -> bool:
            return is_unanimous(got, replica_sets[path].can_write)

        # Ask as many members as a change needs, and the others only if these are too few to read or do not agree.
        is_down = self._fan_out.health.is_down
        first_members = {path: preferred_members(replicas, is_down) for path, replicas in replica_sets.items()}
        answers, errors = self._call_members(first_members, read, enough, _FIRST_READ_SECONDS)
        undecided = [path for path in paths if not is_unanimous(answers[path], replica_sets[path].can_read)]
        if undecided:
            rest = {path: [m for m in replica_sets[path].members if m not in answers[path]] for path in undecided}
            more, failed = self._call_members(
                rest, read, lambda path, got: enough(path, {**answers[path], **got}),
                # where these are not unanimous, two phases settle the value
                is_acceptable=lambda path, got: replica_sets[path].can_read(undamaged_records({**answers[path], **got})),
            )  # fmt: skip
            for path in undecided:
                answers[path] |= more[path]
            errors |= failed
        found: dict[str, RegisterValue | None] = {}
        unsettled: list[str] = []
        for path in paths:
            records = undamaged_records(answers[path])
            if not replica_sets[path].can_read(records):
                raise no_quorum_error(path, replica_sets[path], answers[path], errors, is_write=False)
            newest = replica_sets[path].newest(records)
            same = {m for m, r in records.items() if r.accepted_ballot == newest.accepted_ballot}
            # Where one of two members answers, that is enough for a read, but not for a change, so nothing can be settled.
            # If the value is half-done, a read from the other member misses it until both answer. It is never undone.
            replicas = replica_sets[path]
            agreed = replicas.can_write(same) or (replicas.can_read(same) and not replicas.can_write(records))
            if not agreed and newest.value is not None:
                unsettled.append(path)
            found[path] = newest.value
        if unsettled:  # a change was left half-done: settle the newest value first
            found |= self._run_two_phases(unsettled, RegisterUpdate(keep_value))
        return found

    def settle(self, paths: Sequence[str], on_all_members: bool = True) -> None:
        """Write the newest value of these paths to a quorum, or to every member that answers."""
        for batch in _batches(paths):
            self.retry_outdated(functools.partial(self._settle_batch, batch, on_all_members))

    def _settle_batch(self, paths: Sequence[str], on_all_members: bool) -> None:
        self._run_two_phases(paths, RegisterUpdate(keep_value, on_all_members=on_all_members))

    def retry_outdated(self, call: Callable[[], T]) -> T:
        """Return the result of a call; repeat the call if it used an outdated ring. Raises Unavailable."""
        until = time.monotonic() + 2 * self._deadline_seconds
        while True:
            try:
                return call()
            except Outdated as error:
                if time.monotonic() > until:
                    raise Unavailable(f"{error}; the members still change: run `ckpt-node admin status`") from error
                self._invalidate_ring()
                time.sleep(0.02)

    # --- changing ----------------------------------------------------------------------------------------------

    def update(self, paths: Sequence[str], decide: Decide, expect_absent: bool = False) -> dict[str, RegisterValue | None]:
        """Change the values of paths, and return the value of each after that. Raises Unavailable if no quorum accepts them.

        expect_absent: expect no values, and read none first.
        """
        found: dict[str, RegisterValue | None] = {}
        for batch in _batches(paths):
            found |= self.retry_outdated(functools.partial(self._try_update, batch, decide, expect_absent))
        return found

    def _try_update(self, paths: Sequence[str], decide: Decide, expect_absent: bool) -> dict[str, RegisterValue | None]:
        return self._update_batch(paths, RegisterUpdate(decide, expect_absent))

    def update_fenced(
        self, fence_number: int, paths: Sequence[str], decide: Decide, expect_absent: bool = False,
        on_refused: OnRefused | None = None,
    ) -> dict[str, RegisterValue | None] | Superseded:  # fmt: skip
        """Update with this fence number only, and return the value of each path after that.

        If a member has another fence number, no more paths are changed, and Superseded is returned. A repair may have deleted
        the new objects of the caller then.
        """
        found: dict[str, RegisterValue | None] = {}
        for batch in _batches(paths):
            update = RegisterUpdate(decide, expect_absent, fence_number, on_refused=on_refused)
            try:
                found |= self._update_batch(batch, update)
            except Outdated as error:
                return Superseded(error, may_be_accepted=bool(found or update.possibly_accepted))
        return found

    def _update_batch(self, paths: Sequence[str], update: RegisterUpdate) -> dict[str, RegisterValue | None]:
        remaining = self._change_directly(paths, update) if self._is_direct else paths
        if remaining:
            self._run_two_phases(remaining, update)
        return update.found

    def _require_replica_sets(self, paths: Sequence[str], update: RegisterUpdate) -> tuple[dict[str, ReplicaSet], int]:
        """Return the replica sets of the paths and their fence number. Raises Outdated if it is not the required one."""
        replica_sets = self._replica_sets(paths)
        fence_number = _fence_number(replica_sets)
        if update.required_number is not None and fence_number != update.required_number:
            raise Outdated(f"the members have the fence number {fence_number} now, and not {update.required_number}")
        return replica_sets, fence_number

    def _change_directly(self, paths: Sequence[str], update: RegisterUpdate) -> list[str]:
        """Make direct changes, and return the paths that could not be changed so."""
        all_replica_sets, fence_number = self._require_replica_sets(paths, update)
        replica_sets = {
            path: replicas
            for path, replicas in all_replica_sets.items()
            if len(replicas.groups) == 1 and not self._fan_out.health.is_down(replicas.members[0])
        }
        timeout_seconds = min(self._deadline_seconds, _CHANGE_SECONDS * (1 + len(replica_sets) / 50))
        changes = self._propose_changes(replica_sets, update, fence_number, timeout_seconds)
        remaining = [path for path in paths if path not in replica_sets]
        remaining += [path for path in replica_sets if path not in changes]
        values = {path: each.value for path, each in changes.items()}

        def change(registers: Registers, names: list[str]) -> list[bool]:
            return registers.change([changes[name] for name in names], self._proposer_id, fence_number)

        # If one of several first members raises Outdated, the call raises, although another one may have accepted.
        if len({replica_sets[path].members[0] for path in changes}) > 1:
            update.possibly_accepted.update(values)
        failpoint("register.change")
        first_answers, _ = self._call_members(
            {path: replica_sets[path].members[:1] for path in changes}, change, timeout_seconds=timeout_seconds
        )
        update.note_first_answers(values, first_answers)
        remaining += [path for path in changes if True not in first_answers[path].values()]
        changed_on_first = {path: replica_sets[path] for path in changes if True in first_answers[path].values()}
        failpoint("register.changed")

        def enough(path: str, got: Mapping[str, bool]) -> bool:
            return changed_on_first[path].can_write({changed_on_first[path].members[0], *(m for m, yes in got.items() if yes)})

        others, _ = self._call_members({path: each.members[1:] for path, each in changed_on_first.items()}, change, enough)
        for path in changed_on_first:
            if enough(path, others[path]):
                update.found[path] = changes[path].value
            else:
                remaining.append(path)
        return remaining

    def _propose_changes(
        self, replica_sets: Mapping[str, ReplicaSet], update: RegisterUpdate, fence_number: int, timeout_seconds: float
    ) -> dict[str, DirectChange]:
        """Return the direct changes by path, made from the value of the first member. The other paths need two phases."""
        answers: dict[str, dict[str, RegisterAnswer]] = {path: {} for path in replica_sets}
        if not update.expect_absent:
            answers, _ = self._call_members(
                {path: replicas.members[:1] for path, replicas in replica_sets.items()},
                lambda registers, names: registers.read(names, fence_number),
                timeout_seconds=timeout_seconds,
            )
        changes: dict[str, DirectChange] = {}
        for path, replicas in replica_sets.items():
            record = Register() if update.expect_absent else answers[path].get(replicas.members[0])
            if not isinstance(record, Register):
                continue
            new = update.decide(path, record.value)
            # Where `decide` keeps the value, two phases confirm it: the first member may not have the newest one.
            if new is not None and can_propose_directly(record, fence_number):
                changes[path] = DirectChange(path, record.accepted_ballot, new)
        return changes

    def _run_two_phases(self, paths: Sequence[str], update: RegisterUpdate) -> dict[str, RegisterValue | None]:
        until = time.monotonic() + self._deadline_seconds
        highest = floor_ballot(_fence_number(self._replica_sets(paths)))
        pause, tries = 0.005, 0
        while paths:
            # Never use a ballot twice: two proposals with one ballot could both be accepted somewhere.
            ballot = Ballot(highest.round + 1, f"{self._proposer_id}{next(self._proposals):x}")
            paths, highest = self._try_two_phases(paths, ballot, update)
            tries += 1
            if paths and tries >= _MIN_TRIES and time.monotonic() > until:
                raise not_accepted_error(paths, self._deadline_seconds, update.errors)
            if paths:
                time.sleep(random.SystemRandom().uniform(0, pause))
                pause = min(2 * pause, 0.5)
        return update.found

    def _try_two_phases(self, paths: Sequence[str], ballot: Ballot, update: RegisterUpdate) -> tuple[list[str], Ballot]:
        """Run both phases once. Return the paths to try again, and the highest ballot of any answer."""
        replica_sets, fence_number = self._require_replica_sets(paths, update)
        failpoint("register.prepare")
        promises, errors = self._call_members(
            {path: replicas.members for path, replicas in replica_sets.items()},
            lambda registers, names: registers.prepare(names, ballot, fence_number),
            lambda path, got: not update.on_all_members and is_decided(promises_given(got, ballot), replica_sets[path]),
        )
        for path in paths:
            if not replica_sets[path].can_agree(undamaged_records(promises[path]), damaged_members(promises[path])):
                raise no_quorum_error(path, replica_sets[path], promises[path], errors, is_write=True)
        proposals, undecided, highest = choose_values(replica_sets, promises, ballot, update)
        update.possibly_accepted.update({path: proposal.value for path, proposal in proposals.items()})
        failpoint("register.accept")
        accepted, update.errors = self._call_members(
            {path: replica_sets[path].members for path in proposals},
            lambda registers, names: registers.accept(
                [(name, proposals[name].value) for name in names], ballot, fence_number=fence_number
            ),
            lambda path, got: (
                not update.on_all_members
                # A damaged register refuses every ballot, so its refusal decides nothing.
                and is_decided({m: yes for m, yes in got.items() if yes or m in proposals[path].promising}, replica_sets[path])
            ),
        )
        failpoint("register.accepted")
        accepting = {path: {m for m, yes in accepted[path].items() if yes} for path in proposals}
        agreeable = {
            path: proposal.value
            for path, proposal in proposals.items()
            if replica_sets[path].can_agree(accepting[path], damaged_members(promises[path]))
        }
        restored = replace_damaged(self._registers, self._fan_out, agreeable, promises, ballot, fence_number)
        agreed = {
            path: proposal.value
            for path, proposal in proposals.items()
            if replica_sets[path].can_write(accepting[path] | restored.get(path, set()))
        }
        update.found.update(agreed)
        return [*undecided, *(path for path in proposals if path not in agreed)], highest

    # --- asking ------------------------------------------------------------------------------------------------

    def _call_members(
        self, members_by_path: Mapping[str, Sequence[str]], call: Callable[[Registers, list[str]], Sequence[T]],
        is_enough: Callable[[str, Mapping[str, T]], bool] | None = None, timeout_seconds: float | None = None,
        is_acceptable: Callable[[str, Mapping[str, T]], bool] | None = None,
    ) -> tuple[dict[str, dict[str, T]], dict[str, StoreError]]:  # fmt: skip
        """Call each member once for all of its paths. Return the answers by path and member, and the errors by member.

        members_by_path: those to call for each path. timeout_seconds, is_enough, is_acceptable: as for `FanOut.ask`; the
        conditions are called for each path with its answers. Raises Outdated if a member does.
        """
        names: dict[str, list[str]] = defaultdict(list)
        for path, its_members in members_by_path.items():
            for member in its_members:
                names[member].append(path)

        def by_path(answers: Mapping[str, Sequence[T]]) -> dict[str, dict[str, T]]:
            found: dict[str, dict[str, T]] = {path: {} for path in members_by_path}
            for member, given in answers.items():
                for path, answer in zip(names[member], given, strict=True):
                    found[path][member] = answer
            return found

        def for_all(condition: Callable[[str, Mapping[str, T]], bool] | None) -> Callable[[dict[str, Sequence[T]]], bool]:
            return lambda answers: condition is not None and all(condition(path, got) for path, got in by_path(answers).items())

        calls = {m: functools.partial(call, self._registers[m], names[m]) for m in names}
        answers, errors = self._fan_out.ask(
            calls,
            timeout_seconds or self._deadline_seconds,
            for_all(is_enough),
            is_acceptable=for_all(is_acceptable),
        )
        for error in errors.values():
            if isinstance(error, Outdated):
                raise error
        return by_path(answers), errors


def _fence_number(replica_sets: Mapping[str, ReplicaSet]) -> int:
    return next((replicas.fence_number for replicas in replica_sets.values()), 0)


def _batches(paths: Sequence[str]) -> list[Sequence[str]]:
    return [paths[i : i + BATCH_PATHS] for i in range(0, len(paths), BATCH_PATHS)]
