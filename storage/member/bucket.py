"""`Bucket`: a bucket as a member of a namespace, with objects and registers below one URL and no server process.

    objects/…               the objects that the namespace stores
    registers/paths/…       one object for each register, under its encoded name; replaced by conditional puts (If-Match)
    registers/others/…      registers whose name is not a path; registers/long/… registers whose key would be too long
    registers.json          whether missing registers count as empty ones, and the fence number
    device.json             the identity of the member
    quarantine/…            damaged objects and registers, which no reader finds
    clock                   an empty object, written before a listing: its time is the present time of the server

Each register costs a request: this suits the few hundred files of a checkpoint, not millions of small files.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckpt.storage.base.checked_decode import read_json
from ckpt.storage.base.conditional_store import MAX_TRIES
from ckpt.storage.base.errors import AlreadyExists, IntegrityError, NotFound, Outdated, StoreError, Unavailable
from ckpt.storage.base.threads import DaemonThreadPool
from ckpt.storage.member.bucket_format import (
    REGISTERS_FOLDER,
    decode_register,
    encode_register,
    key_folders,
    object_key,
    register_name,
)
from ckpt.storage.member.damaged_ranges import ChecksummedRange, find_damaged_ranges
from ckpt.storage.member.device import OBJECTS, QUARANTINE, MemberInfo
from ckpt.storage.member.inventory import PART_SECONDS, Inventory, InventoryPart, read_all_parts, read_inventory_part
from ckpt.storage.registers.base import (
    BODY_BYTES,
    REGISTERS_INCOMPLETE,
    Ballot,
    DamagedRegister,
    DirectChange,
    Register,
    RegisterAnswer,
    Registers,
    RegisterValue,
    can_accept,
    can_change_directly,
    can_collect,
    final_record,
    is_final,
    require_same_value,
    with_floor_promise,
    with_promise,
)
from ckpt.storage.registers.fence_numbers import advance_fence, order_key, outdated_message
from ckpt.storage.remote.object_store import ObjectStore, ObjectTag

_THREADS = 16
_FACTS_NAME = "registers.json"
_FACTS_BYTES = 64 << 10
"""The most bytes of registers.json."""
_RECORD_BYTES = BODY_BYTES + (1 << 20)
"""The most bytes of a register's object."""

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class _RegisterFacts:
    """The state that all registers of a bucket share, as it is stored in `registers.json`."""

    is_complete: bool = False
    """Whether a register that is missing has never had a value."""
    fence_number: int = 0

    def apply_to(self, stored: RegisterAnswer | None) -> RegisterAnswer:
        """Return what a member with these facts answers for a register as it is stored; None for a missing one."""
        if stored is None:
            return with_floor_promise(Register(), self.fence_number) if self.is_complete else REGISTERS_INCOMPLETE
        return with_floor_promise(stored, self.fence_number) if isinstance(stored, Register) else stored


class Bucket:
    """A folder of a bucket that is a member of a namespace."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._root = ObjectStore(self.url)
        self.store = ObjectStore(f"{self.url}/{OBJECTS}")
        self._pool = DaemonThreadPool(_THREADS, "ckpt-bucket")
        self.registers = BucketRegisters(self._root, self._pool)

    def info(self) -> MemberInfo:
        """Return the identity of this member; its usage is unknown. Raises StoreError if its record is damaged."""
        try:
            return MemberInfo(str(read_json(self._root.get("device.json"))["id"]), None, None)
        except NotFound:
            try:
                self._root.put_new("device.json", json.dumps({"id": secrets.token_hex(16), "format": 1}).encode())
            except AlreadyExists:
                pass  # another process created it at the same time
            return self.info()
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.url}/device.json is damaged ({error}); delete it") from error

    def verify(self, name: str, ranges: Sequence[ChecksummedRange]) -> list[int]:
        """Return the indices of the damaged ranges of an object. Raises NotFound, and StoreError if the store fails."""
        return find_damaged_ranges(self.store, name, ranges)

    def inventory(self) -> Inventory:
        """Return length and age of every object: the seconds since it was written, by the clock of the server."""
        return read_all_parts(self.inventory_part)

    def inventory_part(self, after: str = "", seconds: float = PART_SECONDS) -> InventoryPart:
        """Return the objects of the folders after `after` that can be listed in about `seconds`."""
        self._root.put("clock", b"")
        now = self._root.modified_at("clock")

        def read(folder: str) -> Inventory:
            return {name: (nbytes, now - modified) for name, nbytes, modified in self.store.list_with_times(folder)}

        return read_inventory_part(self.store.list_folders(), after, seconds, read)

    def link(self, name: str, to: str) -> None:
        """Give an object a second name, by a copy that the server makes; raise NotFound."""
        self.store.copy(name, to)

    def quarantine(self, name: str) -> None:
        """Move a damaged object to the quarantine folder, where readers do not find it and an operator can examine it."""
        self._root.move(f"{OBJECTS}/{name}", f"{QUARANTINE}/{name.replace('/', '_')}-{secrets.token_hex(4)}")

    def sweep(self, older_seconds: float) -> None:
        """Do nothing: parts of unfinished uploads are invisible, and a lifecycle rule of the bucket deletes them."""

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        self.store.close()


class BucketRegisters(Registers):
    """Registers as objects of a bucket, changed by conditional puts."""

    def __init__(self, store: ObjectStore, pool: DaemonThreadPool) -> None:
        self._store = store
        self._pool = pool

    def read(self, names: Sequence[str], fence_number: int = 0) -> list[RegisterAnswer]:
        facts = self._require_current_fence(fence_number)
        answers = self._map_in_threads(lambda name: facts.apply_to(self._read_record(name)[0]), names)
        self._require_current_fence(fence_number)  # a register that was dropped meanwhile must not be reported as missing
        return answers

    def prepare(self, names: Sequence[str], ballot: Ballot, fence_number: int = 0) -> list[RegisterAnswer]:
        def promise(record: RegisterAnswer) -> tuple[Register | None, RegisterAnswer]:
            new = with_promise(record, ballot)
            return new, new or record

        return self._change_records(lambda name: promise, names, fence_number)

    def accept(
        self, values: Sequence[tuple[str, RegisterValue]], ballot: Ballot, repair_damaged: bool = False, fence_number: int = 0
    ) -> list[bool]:
        values_by_name = dict(values)

        def take(name: str) -> Callable[[RegisterAnswer], tuple[Register | None, bool]]:
            def step(record: RegisterAnswer) -> tuple[Register | None, bool]:
                if isinstance(record, Register) and record.accepted_ballot == ballot and record.value == values_by_name[name]:
                    return None, True  # an earlier put without an answer has succeeded
                return (
                    (Register(ballot, ballot, values_by_name[name]), True)
                    if can_accept(record, ballot, repair_damaged)
                    else (None, False)
                )

            return step

        return self._change_records(take, [name for name, _ in values], fence_number)

    def change(self, changes: Sequence[DirectChange], writer: str, fence_number: int = 0) -> list[bool]:
        changes_by_name = {change.name: change for change in changes}

        def take(name: str) -> Callable[[RegisterAnswer], tuple[Register | None, bool]]:
            change = changes_by_name[name]
            ballot = change.expected.next_step(writer)
            is_sent = False

            def step(record: RegisterAnswer) -> tuple[Register | None, bool]:
                nonlocal is_sent
                if isinstance(record, Register) and record.accepted_ballot == ballot and record.value == change.value:
                    return None, True  # an earlier put without an answer has succeeded
                if can_change_directly(record, change):
                    is_sent = True
                    return Register(ballot, ballot, change.value), True
                if is_sent:  # or it has succeeded, and another client has replaced the value
                    raise self._unknown_outcome("another client changes it, too")
                return None, False

            return step

        return self._change_records(take, [change.name for change in changes], fence_number)

    def reset(self) -> None:
        self._change_facts(lambda facts: replace(facts, is_complete=False))
        for entry in list(self._store.list(REGISTERS_FOLDER)):
            self._store.move(entry.name, f"{QUARANTINE}/{entry.name.replace('/', '_')}-{secrets.token_hex(4)}")

    def mark_complete(self) -> None:
        self._change_facts(lambda facts: replace(facts, is_complete=True))

    def fence(self, fence_number: int) -> bool:
        before = self._change_facts(lambda facts: replace(facts, fence_number=advance_fence(facts.fence_number, fence_number)))
        return order_key(before.fence_number) < order_key(fence_number)

    def learn(self, name: str, value: RegisterValue) -> None:
        for _ in range(MAX_TRIES):
            current, tag = self._read_record(name)
            if current is not None and is_final(current):
                return require_same_value(current, name, value)
            if self._store.put_if(object_key(name), encode_register(name, final_record(value)), tag):
                return None
        raise Unavailable(f"{self._store.url}/{object_key(name)} changes all the time; try again")

    def join_ring(self, fence_number: int, kept_prefix: str) -> None:
        def is_earlier(facts: _RegisterFacts) -> bool:
            return order_key(facts.fence_number) < order_key(fence_number)

        if is_earlier(self._read_facts()):
            found = self._map_in_threads(lambda entry: self._read_listed(entry.name), list(self._store.list(REGISTERS_FOLDER)))
            names = [each[0] for each in found if each is not None and each[0] and not each[0].startswith(kept_prefix)]
            self._map_in_threads(lambda name: self._forget_record(name, lambda _, facts: is_earlier(facts)), names)
            self._change_facts(
                lambda facts: (
                    _RegisterFacts(True, advance_fence(facts.fence_number, fence_number)) if is_earlier(facts) else facts
                )
            )

    def drop(self, names: Sequence[str], fence_number: int) -> None:
        self._require_current_fence(fence_number)
        self._map_in_threads(
            lambda name: self._forget_record(name, lambda _, facts: order_key(facts.fence_number) <= order_key(fence_number)),
            names,
        )

    def collect(self, expected_ballots: Sequence[tuple[str, Ballot]], fence_number: int) -> int:
        self._require_current_fence(fence_number)

        def empty(each: tuple[str, Ballot]) -> bool:
            name, ballot = each
            return self._forget_record(name, lambda there, facts: can_collect(there, ballot, facts.fence_number), creates=True)

        return sum(self._map_in_threads(empty, expected_ballots))

    def scan(
        self, prefix: str, after: str = "", limit: int = 10_000, fence_number: int = 0
    ) -> list[tuple[str, RegisterAnswer]]:
        found = [(name, answer) for name, answer in self.scan_all(prefix, fence_number) if name > after]
        return found[:limit]

    def scan_all(self, prefix: str, fence_number: int = 0) -> Iterator[tuple[str, RegisterAnswer]]:
        number = self._require_current_fence(fence_number).fence_number
        folders = [f"{REGISTERS_FOLDER}/{part}" for part in key_folders(prefix)]
        keys = [entry.name for folder in folders for entry in self._store.list(folder)]
        read = self._map_in_threads(self._read_listed, keys)
        for key, each in zip(keys, read, strict=True):
            if each is not None and not each[0]:  # a caller may delete what a file needs that is not listed
                raise StoreError(
                    f"{self._store.url}/{key} can't be read, and only its content names its path; restore an earlier version "
                    "of it, or write the file again if other members have its record"
                )
        found = [each for each in read if each is not None and each[0].startswith(prefix)]
        self._require_current_fence(fence_number)
        for name, answer in sorted(found, key=lambda each: each[0]):
            yield name, with_floor_promise(answer, number) if isinstance(answer, Register) else answer

    def _forget_record(
        self, name: str, can_forget: Callable[[RegisterAnswer, _RegisterFacts], bool], creates: bool = False
    ) -> bool:
        """Empty a register if `can_forget` allows it and the register did not change since it was read; return whether it was.

        The facts are read after the register: a client that changes it by a later ring writes that ring to the facts first.

        creates: also create an empty register where there is none, so that a late first change by an earlier number fails.
        """
        for _ in range(MAX_TRIES):
            stored, tag = self._read_record(name)
            if stored is None and not creates:
                return False
            facts = self._read_facts()
            current = facts.apply_to(stored)
            if is_final(current) or not can_forget(current, facts):
                return False
            if self._store.put_if(object_key(name), encode_register(name, Register()), tag):
                return stored is not None
        return False

    # --- the objects that store registers --------------------------------------------------------------------------

    def _map_in_threads(self, call: Callable[[T], U], items: Sequence[T]) -> list[U]:
        return list(self._pool.map(call, items)) if len(items) > 1 else [call(item) for item in items]

    def _change_records(
        self,
        step: Callable[[str], Callable[[RegisterAnswer], tuple[Register | None, U]]],
        names: Sequence[str],
        fence_number: int,
    ) -> list[U]:
        facts = self._require_current_fence(fence_number)
        if advance_fence(facts.fence_number, fence_number) != facts.fence_number:
            self.fence(fence_number)
        try:
            answers = self._map_in_threads(lambda name: self._replace_record(name, step(name), fence_number), names)
            # If the member was fenced meanwhile, the collection of data agreed on before may have missed these changes.
            self._require_current_fence(fence_number)
        except Outdated as error:  # which means that nothing was changed
            raise self._unknown_outcome(str(error)) from error
        return answers

    def _unknown_outcome(self, reason: str) -> StoreError:
        return StoreError(f"{self._store.url}: some registers may have been changed: {reason}; try again")

    def _replace_record(self, name: str, step: Callable[[RegisterAnswer], tuple[Register | None, U]], fence_number: int) -> U:
        for _ in range(MAX_TRIES):
            stored, tag = self._read_record(name)
            # The facts are read after the register, so that a register that was forgotten after a fence is never taken for new.
            new, answer = step(self._require_current_fence(fence_number).apply_to(stored))
            if new is None or self._store.put_if(object_key(name), encode_register(name, new), tag):
                return answer
        raise Unavailable(f"{self._store.url}/{object_key(name)} changes all the time; try again")

    def _read_record(self, name: str) -> tuple[RegisterAnswer | None, ObjectTag | None]:
        """Return a register as it is stored, and the tag of its object; None if there is none."""
        try:
            data, tag = self._store.get_tagged(object_key(name), _RECORD_BYTES)
        except NotFound:
            return None, None
        except IntegrityError as error:
            return DamagedRegister(str(error)), self._store.tag(object_key(name))
        stored_name, answer = decode_register(data)
        return (answer if stored_name == name else DamagedRegister(f"it is that of {stored_name!r}")), tag

    def _read_listed(self, key: str) -> tuple[str, RegisterAnswer] | None:
        """Return the name and the answer of a register of a listing; None if it was deleted or dropped since.

        The name is "" if neither the object nor its content shows it.
        """
        try:
            name, answer = decode_register(self._store.get_up_to(key, _RECORD_BYTES))
        except NotFound:  # deleted since the listing
            return None
        except IntegrityError:
            name, answer = "", DamagedRegister("it is too long")
        if isinstance(answer, Register) and answer.value is not None:
            answer = Register(answer.promised_ballot, answer.accepted_ballot, RegisterValue(answer.value.head))
        if name == "" or object_key(name) != key:  # the bytes do not contain the name of the register
            return register_name(key), DamagedRegister("it can't be read")
        return (name, answer) if answer != Register() else None  # an empty record is a dropped register

    def _require_current_fence(self, fence_number: int) -> _RegisterFacts:
        facts = self._read_facts()
        if fence_number and order_key(fence_number) < order_key(fence := facts.fence_number):
            raise Outdated(outdated_message(fence, fence_number))
        return facts

    def _read_facts(self) -> _RegisterFacts:
        return self._read_tagged_facts()[0]

    def _read_tagged_facts(self) -> tuple[_RegisterFacts, ObjectTag | None]:
        try:
            data, tag = self._store.get_tagged(_FACTS_NAME, _FACTS_BYTES)
            found = read_json(data)
            return _RegisterFacts(bool(int(found["complete"])), int(found["epoch"])), tag
        except NotFound:
            return _RegisterFacts(), None
        except (IntegrityError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self._store.url}/{_FACTS_NAME} is damaged ({error}); delete it, and run a repair") from error

    def _change_facts(self, change: Callable[[_RegisterFacts], _RegisterFacts]) -> _RegisterFacts:
        """Change the facts; return what they were before."""
        for _ in range(MAX_TRIES):
            facts, tag = self._read_tagged_facts()
            new = change(facts)
            data = json.dumps({"complete": int(new.is_complete), "epoch": new.fence_number}).encode()
            if new == facts or self._store.put_if(_FACTS_NAME, data, tag):
                return facts
        raise Unavailable(f"{self._store.url}/{_FACTS_NAME} changes all the time; try again")
