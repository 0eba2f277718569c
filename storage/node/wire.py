"""What goes over the wire between a node and its callers: MessagePack in Arrow Flight's actions, tickets and descriptors.

    action  <verb>  [arguments …]                  one answer; long lists come in several
    get     [name, position, nbytes]               the bytes of an object, in batches of one column of uint8
    put     [upload, nbytes, digest]               one append of an upload; the answer is its position

Where both are on one host, bytes go another way: near.py. An error travels as its kind and its message, and is raised again
on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pyarrow as pa

from ckpt.storage.base import errors
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.registers.base import Ballot, DamagedRecord, DirectChange, Record, RegisterAnswer, RegisterValue

PROTOCOL_VERSION = 1

PUT_BYTES = 1 << 20
"""Objects up to this size are put in one action, longer ones as an upload."""

MESSAGE_BYTES = 64 << 20
"""The longest append, and the longest arguments of an action. Anything longer is refused unread."""

FRAME_BYTES = 1 << 20
"""What Flight adds to a message, at most."""

NAMES_PER_CALL = 10_000
"""Names of objects or registers in one action, at most; more go in several."""

_MAX_LIST_ITEMS = 200_000  # the longest list in a message: more than any call has use for

_LONG_MESSAGE_BYTES = 1 << 20
_MAX_VALUES = 4_000_000
"""Values in the lists of one message of more than `_LONG` bytes, at most: some 256 MB of objects."""

SCHEMA = pa.schema([pa.field("data", pa.uint8(), nullable=False)])


def pack(value: Any) -> bytes:
    """Numbers, strings, bytes, None and lists of them, as bytes."""
    data: bytes = msgpack.packb(value)
    return data


def unpack(data: Any) -> Any:
    """The counterpart of `pack`. Raises ValueError."""
    size = len(memoryview(data).cast("B"))
    # An empty list is one byte of a message and 64 in memory: long messages may hold a limited number of values.
    count = _limit_values(_MAX_VALUES) if size > _LONG_MESSAGE_BYTES else None
    try:
        return msgpack.unpackb(
            data,
            max_bin_len=MESSAGE_BYTES,
            max_str_len=MESSAGE_BYTES,
            max_array_len=min(_MAX_LIST_ITEMS, size),
            max_map_len=size,
            list_hook=count,
        )
    except (msgpack.UnpackException, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a message of this protocol: {str(error) or type(error).__name__}") from error


def _limit_values(limit: int) -> Callable[[list[Any]], list[Any]]:
    """Returns a hook that passes lists on, and raises ValueError when they hold more than `limit` values together."""
    remaining = limit

    def count(values: list[Any]) -> list[Any]:
        nonlocal remaining
        remaining -= len(values) + 1
        if remaining < 0:
            raise ValueError(f"not a message of this protocol: more than {limit} values")
        return values

    return count


def to_record_batch(data: memoryview) -> pa.RecordBatch:
    """Bytes as a batch of one column, not copied."""
    column = pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def from_record_batch(received: pa.RecordBatch) -> memoryview:
    """The counterpart of `batch`. Raises ValueError."""
    if received.num_columns != 1 or received.column(0).type != pa.uint8():
        raise ValueError("not a batch of this protocol: one column of uint8 is")
    array = received.column(0)
    data = array.buffers()[1]
    if data is None:
        return memoryview(b"")
    return memoryview(data).cast("B")[array.offset : array.offset + len(array)]


def encode_error(error: CkptError) -> bytes:
    return pack([type(error).__name__, str(error)])


def decode_error(data: bytes) -> CkptError | None:
    """The error that the other side raised; None where it says none."""
    try:
        kind, message, *_ = map(str, unpack(data))
    except (ValueError, TypeError):
        return None
    error_class = getattr(errors, kind, StoreError)
    return error_class(message) if isinstance(error_class, type) and issubclass(error_class, CkptError) else StoreError(message)


# --- registers -------------------------------------------------------------------------------------------------


def encode_answers(answers: Sequence[RegisterAnswer]) -> list[Any]:
    return [
        [a.reason] if isinstance(a, DamagedRecord) else [list(a.promised), list(a.accepted), encode_value(a.value)]
        for a in answers
    ]


def decode_answers(data: Sequence[Any]) -> list[RegisterAnswer]:
    return [
        DamagedRecord(a[0])
        if len(a) == 1
        else Record(Ballot(*a[0]), Ballot(*a[1]), None if a[2] is None else RegisterValue(*a[2]))
        for a in data
    ]


def encode_value(value: RegisterValue | None) -> list[bytes] | None:
    return None if value is None else [value.head, value.body]


def encode_changes(changes: Sequence[DirectChange]) -> list[Any]:
    return [[c.name, list(c.expected), encode_value(c.value)] for c in changes]


def decode_changes(data: Sequence[Any]) -> list[DirectChange]:
    return [DirectChange(name, Ballot(*expected), RegisterValue(*value)) for name, expected, value in data]
