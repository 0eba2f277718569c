"""Calls of all kinds to a node, and the objects that it has after each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckpt.storage.node.client import NodeStore
from helpers.register_calls import CALLS as REGISTER_CALLS


def content(seed: int, nbytes: int) -> bytes:
    """Return bytes that show where they belong: no two pages of them are the same."""
    return b"".join(bytes([seed, number % 256, number // 256, 1]) for number in range(-(-nbytes // 4)))[:nbytes]


@dataclass(frozen=True)
class NodeCall:
    """One call or upload, which succeeds as a whole for each object."""

    call: Callable[[NodeStore], object]
    objects: Mapping[str, bytes | None] = field(default_factory=dict)
    """The objects that it writes; None for one that does not exist any more."""
    registers: int = 0
    """How many of the calls to registers it makes."""


def _put(name: str, data: bytes) -> NodeCall:
    return NodeCall(lambda store: store.put(name, data), {name: data})


def _delete(name: str) -> NodeCall:
    return NodeCall(lambda store: store.delete([name]), {name: None})


def _upload(name: str, data: bytes) -> NodeCall:
    def call(store: NodeStore) -> None:
        with store.create(name, len(data)) as writer:
            for start in range(0, len(data), 20_480):
                writer.append(memoryview(data[start : start + 20_480]))
            writer.commit()

    return NodeCall(call, {name: data})


def _uploads_at_once(first: str, second: str, data: bytes) -> NodeCall:
    def call(store: NodeStore) -> None:
        with store.create(first) as one, store.create(second) as two:
            for writer in (one, two):
                writer.append(memoryview(data))
            two.commit()
            one.commit()

    return NodeCall(call, {first: data, second: data})


def _unfinished_uploads(store: NodeStore) -> None:
    store.create("packs/abandoned").append(memoryview(content(99, 9000)))
    with store.create("packs/aborted") as writer:
        writer.append(memoryview(content(98, 9000)))


def _registers(begin: int, end: int) -> NodeCall:
    def call(store: NodeStore) -> None:
        for number in range(begin, end):
            REGISTER_CALLS[number](store.registers)

    return NodeCall(call, registers=end - begin)


NODE_CALLS = (
    _put("small", content(1, 10)),
    _put("x/y/z/deep", content(2, 3000)),
    _registers(0, 1),
    _upload("packs/one", content(3, 45_000)),
    NodeCall(lambda store: store.put_new("new", content(4, 500)), {"new": content(4, 500)}),
    _registers(1, 2),
    _uploads_at_once("packs/two", "packs/three", content(5, 9000)),
    NodeCall(_unfinished_uploads),
    _put("small", content(6, 6000)),
    NodeCall(lambda store: store.link("packs/one", "links/one"), {"links/one": content(3, 45_000)}),
    _registers(2, 3),
    _delete("packs/one"),
    _delete("x/y/z/deep"),
    # The node is killed, and starts again.
    _upload("x/y/packs/four", content(7, 30_000)),
    _registers(3, 4),
    NodeCall(lambda store: store.quarantine("packs/two"), {"packs/two": None}),
    _put("x/y/z/deep", content(8, 5000)),
    _registers(4, 5),
    _delete("new"),
)
"""The calls that a client makes, in this order."""

NODE_RESTART = 13
"""The number of calls before the node is killed."""

QUARANTINE_CALL = 15
"""The index of the call that moves packs/two to the quarantine."""


def objects_after(count: int) -> dict[str, bytes]:
    """Return the objects after the first `count` calls."""
    objects: dict[str, bytes] = {}
    for each in NODE_CALLS[:count]:
        for name, data in each.objects.items():
            if data is None:
                del objects[name]
            else:
                objects[name] = data
    return objects


def register_calls_after(count: int) -> int:
    """Return the number of calls to registers among the first `count` calls."""
    return sum(each.registers for each in NODE_CALLS[:count])
