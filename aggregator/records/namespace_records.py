"""Calls to read, list, change and settle all records of a namespace, also while the record ring changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ckpt.aggregator.cluster.config import NamespaceConfig
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.current_members import Membership
from ckpt.aggregator.records.file_record import FileRecord
from ckpt.aggregator.records.paths import check_path
from ckpt.aggregator.records.paxos import ReplicatedRegisters
from ckpt.aggregator.records.register_update import Decide, OnRefused, Superseded
from ckpt.aggregator.records.replica_set import ReplicaSet
from ckpt.storage.base.errors import Outdated, StoreError, Unavailable
from ckpt.storage.base.plural import format_count
from ckpt.storage.registers.base import ABSENT_NAME, Register, RegisterAnswer, Registers, RegisterValue

ScannedRecords = Mapping[str, Sequence[tuple[str, RegisterAnswer]]]
"""The names and records that each member returned, by member."""

OnOutdated = Callable[[bool, int], None]
"""Called with whether a member may already have accepted the change, and with the current fence number."""


class NamespaceRecords(Membership):
    """The members of a namespace and the records that they keep. Safe to use from many threads."""

    def __init__(self, config: NamespaceConfig) -> None:
        super().__init__(config)
        seconds = config.credentials.deadline_seconds
        self.commit_timeout_seconds = 4 * seconds
        self._replicated_registers = ReplicatedRegisters(
            self._member_registers, self._replica_sets, self.fan_out, seconds, self.invalidate_ring
        )

    def _replica_sets(self, paths: Sequence[str]) -> dict[str, ReplicaSet]:
        ring = self.ring
        return {path: ring.replica_set(path) for path in paths}

    def stat(self, path: str) -> FileRecord | None:
        """Return the record of a path; None if no file or folder exists."""
        return self.stat_all([path])[path]

    def stat_all(self, paths: Sequence[str]) -> dict[str, FileRecord | None]:
        """Return the records of many paths; None for those where no file or folder exists."""
        for path in paths:
            check_path(path)
        if not self.exists():
            return dict.fromkeys(paths)
        found: dict[str, FileRecord | None] = {}
        for name, value in self._replicated_registers.read([f"/{path}" for path in paths]).items():
            file = None if value is None else file_record.decode_record(name[1:], value)
            found[name[1:]] = file if file is not None and file.exists else None
        return found

    def scan(
        self, prefix: str, wait_for_all: bool = True, is_fencing: bool = False
    ) -> tuple[ScannedRecords, dict[str, StoreError]]:
        """Return the records of all names with a prefix by member, without bodies, and the errors of members without an answer.

        wait_for_all: also wait for members whose answers are not needed. is_fencing: fence each member before it lists, so that
        it accepts no change of an earlier ring that is not in its list. Raises Unavailable if so many members are missing
        that a name could be overlooked.
        """
        return self._replicated_registers.retry_outdated(partial(self._scan_by_ring, prefix, wait_for_all, is_fencing))

    def _scan_by_ring(self, prefix: str, wait_for_all: bool, is_fencing: bool) -> tuple[ScannedRecords, dict[str, StoreError]]:
        ring = self.ring

        def read(registers: Registers) -> tuple[list[tuple[str, RegisterAnswer]], bool]:
            if is_fencing:
                registers.fence(ring.fence_number)
            (absent,) = registers.read([ABSENT_NAME], ring.fence_number)
            return list(registers.scan_all(prefix, ring.fence_number)), isinstance(absent, Register)

        calls = {name: partial(read, self._member_registers[name]) for name in ring.all_members}

        def complete(answers: Mapping[str, tuple[object, bool]]) -> bool:
            return ring.can_list([name for name, (_, is_complete) in answers.items() if is_complete])

        def ask(skip_failed: bool) -> tuple[dict[str, tuple[list[tuple[str, RegisterAnswer]], bool]], dict[str, StoreError]]:
            is_acceptable = complete if not wait_for_all else lambda _: False
            return self.fan_out.ask(calls, self.commit_timeout_seconds, is_acceptable=is_acceptable, skip_failed=skip_failed)

        answers, errors = ask(skip_failed=True)
        if not complete(answers):  # the members that did not answer lately are needed after all
            answers, errors = ask(skip_failed=False)
        for error in errors.values():
            if isinstance(error, Outdated):
                raise error
        if not complete(answers):
            reasons = [f"{name}: {error}" for name, error in errors.items()]
            reasons += [
                f"{name}: its records were lost and are not all restored"
                for name, (_, is_complete) in answers.items()
                if not is_complete
            ]
            raise Unavailable(
                f"{self.url} can't be listed without {format_count(len(reasons), 'member')} ({'; '.join(reasons)}); start the "
                "missing members, or run `ckpt-node admin repair`"
            )
        return {name: records for name, (records, _) in answers.items()}, errors

    def read_records(self, names: Sequence[str]) -> dict[str, RegisterValue | None]:
        """Return the values of registers by name, tombstones too."""
        return self._replicated_registers.read(names)

    def update_record(self, path: str, decide: Decide) -> RegisterValue | None:
        """Change the record of a path, and return its value after the change."""
        return self._replicated_registers.update([f"/{path}"], decide)[f"/{path}"]

    def update_record_fenced(
        self, fence_number: int, path: str, decide: Decide, on_outdated: OnOutdated, expect_absent: bool = False,
        on_refused: OnRefused | None = None,
    ) -> RegisterValue | None:  # fmt: skip
        """Change the record of a path with this fence number, and return its value after the change.

        on_outdated: called where members have another number now. It makes sure that the objects of the new value exist, or
        raises. expect_absent: expect no value, and read none first. on_refused: called where no member has accepted the first
        proposal.
        """
        names = [f"/{path}"]
        return self.update_records_fenced(fence_number, names, decide, on_outdated, expect_absent, on_refused)[names[0]]

    def update_records_fenced(
        self, fence_number: int, names: Sequence[str], decide: Decide, on_outdated: OnOutdated, expect_absent: bool = False,
        on_refused: OnRefused | None = None,
    ) -> dict[str, RegisterValue | None]:  # fmt: skip
        """Change many registers as `update_record_fenced` does, and return their values after the change by name.

        Raises Unavailable if the members change all the time.
        """
        until = time.monotonic() + 2 * self.commit_timeout_seconds
        while True:
            outcome = self._replicated_registers.update_fenced(fence_number, names, decide, expect_absent, on_refused)
            if not isinstance(outcome, Superseded):
                return outcome
            if time.monotonic() > until:
                reason = outcome.reason
                raise Unavailable(f"{self.url}: {reason}; the members still change, try again") from reason
            self.invalidate_ring()
            fence_number = self.ring.fence_number
            on_outdated(outcome.may_be_accepted, fence_number)

    def update_register(self, name: str, decide: Decide) -> RegisterValue | None:
        """Change a register of the namespace itself, whose name no path has, and return its value after the change."""
        return self._replicated_registers.update([name], decide)[name]

    def settle(self, names: Sequence[str], on_all_members: bool = True) -> None:
        """Write the newest value of these registers to a quorum of their replica sets, or to all members that answer."""
        self._replicated_registers.settle(names, on_all_members)
