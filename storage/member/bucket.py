"""`Bucket`: a bucket as a member of a namespace, with objects and registers below one URL and no server process.

    objects/…               the objects that the namespace stores
    registers/paths/…       one object for each register, under its encoded name; replaced by conditional puts (If-Match)
    registers/others/…      registers whose name is not a path; registers/long/… registers whose key would be too long
    registers.json          whether missing registers count as empty ones, and the fence number
    device.json             the identity of the member

Each register costs a request: this suits the few hundred files of a checkpoint, not millions of small files.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgpack
import xxhash

from ckpt.storage.base.checked_decode import read_json
from ckpt.storage.base.conditional_store import MAX_TRIES
from ckpt.storage.base.errors import AlreadyExists, IntegrityError, NotFound, Outdated, StoreError, Unavailable, is_transient
from ckpt.storage.base.threads import DaemonThreadPool
from ckpt.storage.member.device import OBJECTS, QUARANTINE, MemberInfo, find_damaged_ranges
from ckpt.storage.registers.base import (
    BODY_BYTES,
    REGISTERS_INCOMPLETE,
    Ballot,
    DamagedRecord,
    DirectChange,
    Record,
    RegisterAnswer,
    Registers,
    RegisterValue,
    can_accept,
    can_change_directly,
    can_collect,
    decode_ballot,
    encode_ballot,
    final_record,
    is_final,
    record_checksum,
    require_record_fits,
    require_same_value,
    with_floor_promise,
    with_promise,
)
from ckpt.storage.registers.fence_numbers import advance_fence, order_key, outdated_message
from ckpt.storage.remote.object_store import ObjectStore, ObjectTag

_THREADS = 16
_KEY_BYTES = 900
_ESCAPED_CHARACTERS = re.compile(r"[^A-Za-z0-9.\-]")
_REGISTERS_FOLDER = "registers"
_FACTS_NAME = "registers.json"
_FACTS_BYTES = 64 << 10
_RECORD_BYTES = BODY_BYTES + (1 << 20)
"""The most bytes of registers.json and of a register's object."""

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class _RegisterFacts:
    """What holds for all registers of a bucket; `registers.json` has it."""

    is_complete: bool = False
    """Whether a register that is missing has never had a value."""
    fence_number: int = 0


_COMPLETE_FACTS = _RegisterFacts(is_complete=True)
"""Facts with which a register is read as it is stored, regardless of the facts of the bucket."""


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

    def verify(self, name: str, ranges: Sequence[tuple[int, int, bytes]]) -> list[int]:
        """Return the indices of the damaged ranges (position, length, checksums of cells) of an object."""
        return find_damaged_ranges(self.store, name, ranges)

    def inventory(self) -> dict[str, tuple[int, float]]:
        """Return length and age of every object: the seconds since it was written, by the clock of the server."""
        self._root.put("clock", b"")
        now = self._root.modified_at("clock")
        return {name: (nbytes, now - modified) for name, nbytes, modified in self.store.list_with_times()}

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
        answers = self._map_in_threads(lambda name: self._read_record(name, facts)[0], names)
        self._require_current_fence(fence_number)  # a register that was dropped meanwhile must not be reported as missing
        return answers

    def prepare(self, names: Sequence[str], ballot: Ballot, fence_number: int = 0) -> list[RegisterAnswer]:
        def promise(record: RegisterAnswer) -> tuple[Record | None, RegisterAnswer]:
            new = with_promise(record, ballot)
            return new, new or record

        return self._change_records(lambda name: promise, names, fence_number)

    def accept(
        self, values: Sequence[tuple[str, RegisterValue]], ballot: Ballot, repair_damaged: bool = False, fence_number: int = 0
    ) -> list[bool]:
        values_by_name = dict(values)

        def take(name: str) -> Callable[[RegisterAnswer], tuple[Record | None, bool]]:
            def step(record: RegisterAnswer) -> tuple[Record | None, bool]:
                if isinstance(record, Record) and record.accepted == ballot and record.value == values_by_name[name]:
                    return None, True  # an earlier put without an answer has succeeded
                return (
                    (Record(ballot, ballot, values_by_name[name]), True)
                    if can_accept(record, ballot, repair_damaged)
                    else (None, False)
                )

            return step

        return self._change_records(take, [name for name, _ in values], fence_number)

    def change(self, changes: Sequence[DirectChange], writer: str, fence_number: int = 0) -> list[bool]:
        changes_by_name = {change.name: change for change in changes}

        def take(name: str) -> Callable[[RegisterAnswer], tuple[Record | None, bool]]:
            change = changes_by_name[name]
            ballot = change.expected.next_step(writer)

            def step(record: RegisterAnswer) -> tuple[Record | None, bool]:
                if isinstance(record, Record) and record.accepted == ballot and record.value == change.value:
                    return None, True  # an earlier put without an answer has succeeded
                return (Record(ballot, ballot, change.value), True) if can_change_directly(record, change) else (None, False)

            return step

        return self._change_records(take, [change.name for change in changes], fence_number)

    def reset(self) -> None:
        self._change_facts(lambda facts: replace(facts, is_complete=False))
        for entry in list(self._store.list(_REGISTERS_FOLDER)):
            self._store.move(entry.name, f"{QUARANTINE}/{entry.name.replace('/', '_')}-{secrets.token_hex(4)}")

    def mark_complete(self) -> None:
        self._change_facts(lambda facts: replace(facts, is_complete=True))

    def fence(self, fence_number: int) -> bool:
        before = self._change_facts(lambda facts: replace(facts, fence_number=advance_fence(facts.fence_number, fence_number)))
        return order_key(before.fence_number) < order_key(fence_number)

    def learn(self, name: str, value: RegisterValue) -> None:
        for _ in range(MAX_TRIES):
            current, tag = self._read_record(name, _COMPLETE_FACTS)
            if is_final(current):
                return require_same_value(current, name, value)
            if self._store.put_if(_object_key(name), _encode_record(name, final_record(value)), tag):
                return None
        raise Unavailable(f"{self._store.url}/{_object_key(name)} changes all the time; try again")

    def join_ring(self, fence_number: int, kept_prefix: str) -> None:
        def is_earlier(facts: _RegisterFacts) -> bool:
            return order_key(facts.fence_number) < order_key(fence_number)

        if is_earlier(self._read_facts()):
            found = self._map_in_threads(lambda entry: self._read_listed(entry.name), list(self._store.list(_REGISTERS_FOLDER)))
            names = [each[0] for each in found if each is not None and not each[0].startswith(kept_prefix)]
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
            return self._forget_record(name, lambda there, facts: can_collect(there, ballot, facts.fence_number))

        return sum(self._map_in_threads(empty, expected_ballots))

    def scan(
        self, prefix: str, after: str = "", limit: int = 10_000, fence_number: int = 0
    ) -> list[tuple[str, RegisterAnswer]]:
        found = [(name, answer) for name, answer in self.scan_all(prefix, fence_number) if name > after]
        return found[:limit]

    def scan_all(self, prefix: str, fence_number: int = 0) -> Iterator[tuple[str, RegisterAnswer]]:
        number = self._require_current_fence(fence_number).fence_number
        folders = [f"{_REGISTERS_FOLDER}/{part}" for part in _key_folders(prefix)]
        keys = [entry.name for folder in folders for entry in self._store.list(folder)]
        found = [
            each for each in self._map_in_threads(self._read_listed, keys) if each is not None and each[0].startswith(prefix)
        ]
        self._require_current_fence(fence_number)
        for name, answer in sorted(found, key=lambda each: each[0]):
            yield name, with_floor_promise(answer, number) if isinstance(answer, Record) else answer

    def _forget_record(self, name: str, can_forget: Callable[[RegisterAnswer, _RegisterFacts], bool]) -> bool:
        """Empty a register if `can_forget` allows it and the register did not change since it was read; return whether it was.

        The facts are read after the register: a client that changes it by a later ring writes that ring to the facts first.
        """
        for _ in range(MAX_TRIES):
            current, tag = self._read_record(name, _COMPLETE_FACTS)
            if tag is None or is_final(current) or not can_forget(current, self._read_facts()):
                return False
            if self._store.put_if(_object_key(name), _encode_record(name, Record()), tag):
                return True
        return False

    # --- objects -----------------------------------------------------------------------------------------------

    def _map_in_threads(self, call: Callable[[T], U], items: Sequence[T]) -> list[U]:
        return list(self._pool.map(call, items)) if len(items) > 1 else [call(item) for item in items]

    def _change_records(
        self,
        step: Callable[[str], Callable[[RegisterAnswer], tuple[Record | None, U]]],
        names: Sequence[str],
        fence_number: int,
    ) -> list[U]:
        facts = self._require_current_fence(fence_number)
        if advance_fence(facts.fence_number, fence_number) != facts.fence_number:
            self.fence(fence_number)
            facts = self._require_current_fence(fence_number)
        answers = self._map_in_threads(lambda name: self._replace_record(name, step(name), facts), names)
        # If the member was fenced meanwhile, the collection of data agreed on before the fence may have missed these changes.
        self._require_current_fence(fence_number)
        return answers

    def _replace_record(self, name: str, step: Callable[[RegisterAnswer], tuple[Record | None, U]], facts: _RegisterFacts) -> U:
        for _ in range(MAX_TRIES):
            record, tag = self._read_record(name, facts)
            new, answer = step(record)
            if new is None or self._store.put_if(_object_key(name), _encode_record(name, new), tag):
                return answer
        raise Unavailable(f"{self._store.url}/{_object_key(name)} changes all the time; try again")

    def _read_record(self, name: str, facts: _RegisterFacts) -> tuple[RegisterAnswer, ObjectTag | None]:
        try:
            data, tag = self._store.get_tagged(_object_key(name), _RECORD_BYTES)
        except NotFound:
            return with_floor_promise(Record(), facts.fence_number) if facts.is_complete else REGISTERS_INCOMPLETE, None
        except IntegrityError as error:
            return DamagedRecord(str(error)), self._store.tag(_object_key(name))
        stored_name, answer = _decode_record(data)
        if stored_name != name:
            return DamagedRecord(f"it is that of {stored_name!r}"), tag
        return (with_floor_promise(answer, facts.fence_number) if isinstance(answer, Record) else answer), tag

    def _read_listed(self, key: str) -> tuple[str, RegisterAnswer] | None:
        try:
            name, answer = _decode_record(self._store.get_up_to(key, _RECORD_BYTES))
        except NotFound:  # deleted since the listing
            return None
        except IntegrityError:
            name, answer = "", DamagedRecord("it is too long")
        if isinstance(answer, Record) and answer.value is not None:
            answer = Record(answer.promised, answer.accepted, RegisterValue(answer.value.head))
        if name == "" or _object_key(name) != key:  # the bytes do not contain the name of the register
            return (_register_name(key), DamagedRecord("it can't be read")) if _register_name(key) else None
        return (name, answer) if answer != Record() else None  # an empty record is a dropped register

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


def _key_folders(prefix: str) -> list[str]:
    """Return the folders that may contain registers whose names begin with `prefix`."""
    if not prefix:
        return ["paths", "others", "long"]
    return ["paths", "long"] if prefix.startswith("/") else ["others", "long"]


def _object_key(name: str) -> str:
    """Return the object name of a register; a byte that object names do not allow becomes _ and two hexadecimal digits."""
    folder = "paths" if name.startswith("/") else "others"
    parts = [_escape_segment(part) for part in name.removeprefix("/").split("/")]
    key = f"{_REGISTERS_FOLDER}/{folder}/{'/'.join(parts)}"
    return key if len(key) <= _KEY_BYTES else f"{_REGISTERS_FOLDER}/long/{xxhash.xxh3_128_hexdigest(name.encode())}"


def _register_name(key: str) -> str:
    """Return the register name of an object name; "" for a long name, of which the object name has only a hash."""
    folder, _, rest = key.removeprefix(f"{_REGISTERS_FOLDER}/").partition("/")
    plain = re.sub(rb"_([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), rest.encode()).decode("utf-8", "replace")
    return {"paths": f"/{plain}", "others": plain}.get(folder, "")


def _escape_segment(part: str) -> str:
    plain = _ESCAPED_CHARACTERS.sub(lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), part)
    return f"_2e{plain[1:]}" if plain.startswith(".") else plain


def _encode_record(name: str, record: Record) -> bytes:
    value = record.value
    require_record_fits(name, value)
    promised, accepted = encode_ballot(record.promised), encode_ballot(record.accepted)
    packed: bytes = msgpack.packb(
        [name, promised, accepted, value and [value.head, value.body], record_checksum(name, promised, accepted, value)]
    )
    return packed


def _decode_record(data: bytes) -> tuple[str, RegisterAnswer]:
    """Return the name and the record; the name is "" if it cannot be read."""
    name = ""
    try:
        name, promised, accepted, given, total = msgpack.unpackb(data, max_bin_len=2 * BODY_BYTES)
        value = None if given is None else RegisterValue(*given)
        if record_checksum(name, promised, accepted, value) == total:
            return name, Record(decode_ballot(promised), decode_ballot(accepted), value)
    except Exception as error:  # msgpack raises errors of many types for other bytes
        if is_transient(error):
            raise
        return str(name), DamagedRecord("it can't be read")
    return name, DamagedRecord("its checksum does not match")
