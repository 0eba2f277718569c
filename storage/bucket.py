"""A bucket as a member of a namespace: objects and registers below one URL. No process serves it: every client is its own.

    objects/…               what the namespace stores
    registers/paths/…       one object a register, below its encoded name; replaced only as it was read (If-Match)
    registers/others/…      registers whose name is no path; registers/long/… those whose key would be too long
    registers.json          whether absent registers are empty ones, and the number of the ring that fences
    device.json             who it is

One request a register: for the few hundred files of a checkpoint, not for millions of small ones.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgpack
import xxhash

from ckpt.storage.device import OBJECTS, QUARANTINE, Info, damaged
from ckpt.storage.errors import AlreadyExists, IntegrityError, NotFound, Outdated, StoreError, Unavailable
from ckpt.storage.fence_numbers import in_order, outdated, raised
from ckpt.storage.objects import ObjectStore
from ckpt.storage.registers import (
    BODY_BYTES,
    UNKNOWN,
    Answer,
    Ballot,
    Change,
    Damaged,
    Record,
    Registers,
    Value,
    accepts,
    check_same,
    checksum,
    collectable,
    decode_ballot,
    encode_ballot,
    final,
    is_final,
    shown,
    taken,
    with_promise,
)
from ckpt.storage.threads import Threads

_THREADS = 16
_KEY_BYTES = 900
_TRIES = 20
_SPECIAL = re.compile(r"[^A-Za-z0-9.\-]")
_FOLDER = "registers"
_FACTS = "registers.json"
_FACTS_BYTES = 64 << 10
_RECORD_BYTES = BODY_BYTES + (1 << 20)
"""The longest objects of both kinds."""
_COMPLETE = {"complete": 1, "epoch": 0}
"""For reading a register as it is stored, whatever the bucket's own facts say."""

T = TypeVar("T")
U = TypeVar("U")


class Bucket:
    """A folder of a bucket that joins a namespace."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._root = ObjectStore(self.url)
        self.store = ObjectStore(f"{self.url}/{OBJECTS}")
        self._pool = Threads(_THREADS, "ckpt-bucket")
        self.registers = BucketRegisters(self._root, self._pool)

    def info(self) -> Info:
        """Who this is. How full it is nobody knows."""
        try:
            return Info(str(json.loads(self._root.get("device.json"))["id"]), None, None)
        except NotFound:
            try:
                self._root.put_new("device.json", json.dumps({"id": secrets.token_hex(16), "format": 1}).encode())
            except AlreadyExists:
                pass  # by another process, at the same time
            return self.info()
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.url}/device.json is damaged ({error}); delete it") from error

    def verify(self, name: str, ranges: Sequence[tuple[int, int, bytes]]) -> list[int]:
        """The numbers of those ranges (position, length, checksums of cells) of an object that are damaged."""
        return damaged(self.store, name, ranges)

    def inventory(self) -> dict[str, tuple[int, float]]:
        """Length of every object, and the seconds since it was made durable, by the bucket's own clock."""
        self._root.put("clock", b"")
        now = self._root.modified("clock")
        return {name: (nbytes, now - modified) for name, nbytes, modified in self.store.list_modified()}

    def link(self, name: str, to: str) -> None:
        """Give an object a second name: a copy, made by the bucket. Raises NotFound."""
        self.store.copy(name, to)

    def quarantine(self, name: str) -> None:
        """Keep a damaged object for whoever wants to know why, where no reader finds it."""
        self._root.move(f"{OBJECTS}/{name}", f"{QUARANTINE}/{name.replace('/', '_')}-{secrets.token_hex(4)}")

    def sweep(self, older_seconds: float) -> None:
        """Nothing: parts of uploads that were never completed are invisible, and a rule of the bucket removes them."""

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        self.store.close()


class BucketRegisters(Registers):
    """Registers as objects that are replaced only as they were read."""

    def __init__(self, store: ObjectStore, pool: Threads) -> None:
        self._store = store
        self._pool = pool

    def read(self, names: Sequence[str], epoch: int = 0) -> list[Answer]:
        facts = self._checked(epoch)
        answers = self._each(lambda name: self._get(name, facts)[0], names)
        self._checked(epoch)  # what was dropped meanwhile is not nothing
        return answers

    def prepare(self, names: Sequence[str], ballot: Ballot, epoch: int = 0) -> list[Answer]:
        def promise(record: Answer) -> tuple[Record | None, Answer]:
            new = with_promise(record, ballot)
            return new, new or record

        return self._changed(lambda name: promise, names, epoch)

    def accept(self, values: Sequence[tuple[str, Value]], ballot: Ballot, heal: bool = False, epoch: int = 0) -> list[bool]:
        wanted = dict(values)

        def take(name: str) -> Callable[[Answer], tuple[Record | None, bool]]:
            def step(record: Answer) -> tuple[Record | None, bool]:
                if isinstance(record, Record) and record.accepted == ballot and record.value == wanted[name]:
                    return None, True  # by a try that seemed to fail
                return (Record(ballot, ballot, wanted[name]), True) if accepts(record, ballot, heal) else (None, False)

            return step

        return self._changed(take, [name for name, _ in values], epoch)

    def change(self, changes: Sequence[Change], writer: str, epoch: int = 0) -> list[bool]:
        wanted = {change.name: change for change in changes}

        def take(name: str) -> Callable[[Answer], tuple[Record | None, bool]]:
            change = wanted[name]
            ballot = change.expected.next_step(writer)

            def step(record: Answer) -> tuple[Record | None, bool]:
                if isinstance(record, Record) and record.accepted == ballot and record.value == change.value:
                    return None, True  # by a try that seemed to fail
                return (Record(ballot, ballot, change.value), True) if taken(record, change) else (None, False)

            return step

        return self._changed(take, [change.name for change in changes], epoch)

    def start_anew(self) -> None:
        self._note(lambda facts: facts | {"complete": 0})
        for entry in list(self._store.list(_FOLDER)):
            self._store.move(entry.name, f"{QUARANTINE}/{entry.name.replace('/', '_')}-{secrets.token_hex(4)}")

    def complete(self) -> None:
        self._note(lambda facts: facts | {"complete": 1})

    def fence(self, epoch: int) -> bool:
        before = self._note(lambda facts: facts | {"epoch": raised(facts["epoch"], epoch)})
        return in_order(before["epoch"]) < in_order(epoch)

    def learn(self, name: str, value: Value) -> None:
        for _ in range(_TRIES):
            there, tag = self._get(name, _COMPLETE)
            if is_final(there):
                return check_same(there, name, value)
            if self._store.put_if(_key(name), _encode(name, final(value)), tag):
                return None
        raise Unavailable(f"{self._store.url}/{_key(name)} changes all the time; try again")

    def join(self, epoch: int, keep: str) -> None:
        def is_earlier(facts: dict[str, int]) -> bool:
            return in_order(facts["epoch"]) < in_order(epoch)

        if is_earlier(self._facts()):
            found = self._each(lambda entry: self._listed(entry.name), list(self._store.list(_FOLDER)))
            names = [each[0] for each in found if each is not None and not each[0].startswith(keep)]
            self._each(lambda name: self._empty(name, lambda _, facts: is_earlier(facts)), names)
            joined = {"complete": 1, "epoch": epoch}
            self._note(lambda facts: joined | {"epoch": raised(facts["epoch"], epoch)} if is_earlier(facts) else facts)

    def drop(self, names: Sequence[str], epoch: int) -> None:
        self._checked(epoch)
        self._each(lambda name: self._empty(name, lambda _, facts: in_order(facts["epoch"]) <= in_order(epoch)), names)

    def collect(self, found: Sequence[tuple[str, Ballot]], epoch: int) -> int:
        self._checked(epoch)

        def empty(each: tuple[str, Ballot]) -> bool:
            name, ballot = each
            return self._empty(name, lambda there, facts: collectable(there, ballot, facts["epoch"]))

        return sum(self._each(empty, found))

    def scan(self, prefix: str, after: str = "", limit: int = 10_000, epoch: int = 0) -> list[tuple[str, Answer]]:
        found = [(name, answer) for name, answer in self.scan_all(prefix, epoch) if name > after]
        return found[:limit]

    def scan_all(self, prefix: str, epoch: int = 0) -> Iterator[tuple[str, Answer]]:
        number = self._checked(epoch)["epoch"]
        folders = [f"{_FOLDER}/{part}" for part in _folders(prefix)]
        keys = [entry.name for folder in folders for entry in self._store.list(folder)]
        found = [each for each in self._each(self._listed, keys) if each is not None and each[0].startswith(prefix)]
        self._checked(epoch)
        for name, answer in sorted(found, key=lambda each: each[0]):
            yield name, shown(answer, number) if isinstance(answer, Record) else answer

    def _empty(self, name: str, may: Callable[[Answer, dict[str, int]], bool]) -> bool:
        """Forget a register, if it may be forgotten after it was read, and is as it was read then: whoever changes it by a
        later ring notes that ring first. Whether it was forgotten."""
        for _ in range(_TRIES):
            there, tag = self._get(name, _COMPLETE)
            if tag is None or is_final(there) or not may(there, self._facts()):
                return False
            if self._store.put_if(_key(name), _encode(name, Record()), tag):
                return True
        return False

    # --- objects -----------------------------------------------------------------------------------------------

    def _each(self, call: Callable[[T], U], items: Sequence[T]) -> list[U]:
        return list(self._pool.map(call, items)) if len(items) > 1 else [call(item) for item in items]

    def _changed(
        self, step: Callable[[str], Callable[[Answer], tuple[Record | None, U]]], names: Sequence[str], epoch: int
    ) -> list[U]:
        facts = self._checked(epoch)
        if raised(facts["epoch"], epoch) != facts["epoch"]:
            self.fence(epoch)
            facts = self._checked(epoch)
        answers = self._each(lambda name: self._replace(name, step(name), facts), names)
        # Fenced meanwhile: it may have been too late for whoever collects what was agreed before the fence.
        self._checked(epoch)
        return answers

    def _replace(self, name: str, step: Callable[[Answer], tuple[Record | None, U]], facts: dict[str, int]) -> U:
        for _ in range(_TRIES):
            record, tag = self._get(name, facts)
            new, answer = step(record)
            if new is None or self._store.put_if(_key(name), _encode(name, new), tag):
                return answer
        raise Unavailable(f"{self._store.url}/{_key(name)} changes all the time; try again")

    def _get(self, name: str, facts: dict[str, int]) -> tuple[Answer, Any]:
        try:
            data, tag = self._store.get_tagged(_key(name), _RECORD_BYTES)
        except NotFound:
            return shown(Record(), facts["epoch"]) if facts["complete"] else UNKNOWN, None
        except IntegrityError as error:
            return Damaged(str(error)), self._store.tag(_key(name))
        told, answer = _decode(data)
        if told != name:
            return Damaged(f"it is that of {told!r}"), tag
        return (shown(answer, facts["epoch"]) if isinstance(answer, Record) else answer), tag

    def _listed(self, key: str) -> tuple[str, Answer] | None:
        try:
            name, answer = _decode(self._store.get_up_to(key, _RECORD_BYTES))
        except NotFound:  # dropped meanwhile
            return None
        except IntegrityError:
            name, answer = "", Damaged("it is too long")
        if isinstance(answer, Record) and answer.value is not None:
            answer = Record(answer.promised, answer.accepted, Value(answer.value.head))
        if name == "" or _key(name) != key:  # its bytes do not even say whose it is
            return (_name(key), Damaged("it can't be read")) if _name(key) else None
        return (name, answer) if answer != Record() else None  # nothing: it was dropped

    def _checked(self, epoch: int) -> dict[str, int]:
        facts = self._facts()
        if epoch and in_order(epoch) < in_order(fence := facts["epoch"]):
            raise Outdated(outdated(fence, epoch))
        return facts

    def _facts(self) -> dict[str, int]:
        return self._tagged_facts()[0]

    def _tagged_facts(self) -> tuple[dict[str, int], Any]:
        try:
            data, tag = self._store.get_tagged(_FACTS, _FACTS_BYTES)
            found = json.loads(data)
            return {"complete": int(found["complete"]), "epoch": int(found["epoch"])}, tag
        except NotFound:
            return {"complete": 0, "epoch": 0}, None
        except (IntegrityError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self._store.url}/{_FACTS} is damaged ({error}); delete it, and run a repair") from error

    def _note(self, change: Callable[[dict[str, int]], dict[str, int]]) -> dict[str, int]:
        """Change the facts; what they were before."""
        for _ in range(_TRIES):
            facts, tag = self._tagged_facts()
            if change(facts) == facts or self._store.put_if(_FACTS, json.dumps(change(facts)).encode(), tag):
                return facts
        raise Unavailable(f"{self._store.url}/{_FACTS} changes all the time; try again")


def _folders(prefix: str) -> list[str]:
    """Where registers may lie whose names begin so."""
    if not prefix:
        return ["paths", "others", "long"]
    return ["paths", "long"] if prefix.startswith("/") else ["others", "long"]


def _key(name: str) -> str:
    """The object of a register: what a name of the store can't hold stands as _ and two hexadecimal digits a byte."""
    folder = "paths" if name.startswith("/") else "others"
    parts = [_escape(part) for part in name.removeprefix("/").split("/")]
    key = f"{_FOLDER}/{folder}/{'/'.join(parts)}"
    return key if len(key) <= _KEY_BYTES else f"{_FOLDER}/long/{xxhash.xxh3_128_hexdigest(name.encode())}"


def _name(key: str) -> str:
    """The register of a key; "" where that is too long to be in it."""
    folder, _, rest = key.removeprefix(f"{_FOLDER}/").partition("/")
    plain = re.sub(rb"_([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), rest.encode()).decode("utf-8", "replace")
    return {"paths": f"/{plain}", "others": plain}.get(folder, "")


def _escape(part: str) -> str:
    plain = _SPECIAL.sub(lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), part)
    return f"_2e{plain[1:]}" if plain.startswith(".") else plain


def _encode(name: str, record: Record) -> bytes:
    value = record.value
    if value is not None and len(value.head) + len(value.body) > BODY_BYTES:
        raise StoreError(f"the record of {name} has {len(value.body)} bytes; a register takes {BODY_BYTES}")
    promised, accepted = encode_ballot(record.promised), encode_ballot(record.accepted)
    packed: bytes = msgpack.packb(
        [name, promised, accepted, value and [value.head, value.body], checksum(name, promised, accepted, value)]
    )
    return packed


def _decode(data: bytes) -> tuple[str, Answer]:
    """The name and the record; "" where not even the name can be read."""
    name = ""
    try:
        name, promised, accepted, given, total = msgpack.unpackb(data, max_bin_len=2 * BODY_BYTES)
        value = None if given is None else Value(*given)
        if checksum(name, promised, accepted, value) == total:
            return name, Record(decode_ballot(promised), decode_ballot(accepted), value)
    except Exception:  # whatever the library makes of other bytes
        return str(name), Damaged("it can't be read")
    return name, Damaged("its checksum does not match")
