"""The messages between a node and its clients: MessagePack in actions, tickets and descriptors of Arrow Flight.

    action  <verb>  [arguments …]                  one answer; a long list is sent in several answers
    get     [name, position, nbytes]               the bytes of an object, in batches with one column of uint8
    put     [upload, nbytes, digest]               one append of an upload; the answer is its position

A client on the same host reads and writes the bytes directly: fd_passing_server.py. An error is sent as its kind and message,
and the client raises it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgpack
import pyarrow as pa

from ckpt.storage.base import errors
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.registers.base import Ballot, DamagedRegister, DirectChange, Register, RegisterAnswer, RegisterValue

if TYPE_CHECKING:
    from ckpt.storage.base.store import Buffer

PROTOCOL_VERSION = 1
SAME_VERSION_ADVICE = "install the same version of ckpt-store on both"

UPLOAD_LEASE_SECONDS = 60.0
"""How long a node keeps an upload without a call of its client."""

PUT_BYTES = 1 << 20
"""Objects up to this size are put in one action, larger ones as an upload; `put_new` uses one action for any size."""

MESSAGE_BYTES = 64 << 20
"""The longest append, and the longest arguments of an action. Anything longer is refused before it is decoded."""

FRAME_BYTES = 1 << 20
"""The most bytes that Flight adds to a message."""

NAMES_PER_CALL = 10_000
"""The most names of objects or registers in one action; more are sent in several."""

_MAX_LIST_ITEMS = 200_000
"""The longest list in a message; no call needs a longer one."""

_LONG_MESSAGE_BYTES = 1 << 20
_MAX_VALUES = 4_000_000
"""The most values in all lists of one message of more than `_LONG_MESSAGE_BYTES`: about 256 MB of Python objects."""

SCHEMA = pa.schema([pa.field("data", pa.uint8(), nullable=False)])


def pack(value: object) -> bytes:
    """Return a value as bytes: numbers, strings, bytes, None, and lists of them."""
    data: bytes = msgpack.packb(value)
    return data


def unpack(data: Buffer | pa.Buffer) -> Any:
    """Return the value that `pack` encoded. Raises ValueError for bytes that are not a message of this protocol."""
    size = len(memoryview(data).cast("B"))
    # An empty list takes one byte of a message and 64 bytes of memory, so the values of long messages are limited.
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


def _limit_values(limit: int) -> Callable[[list[object]], list[object]]:
    """Return a hook for each decoded list, which raises ValueError if all lists together have more than `limit` values."""
    remaining = limit

    def count(values: list[object]) -> list[object]:
        nonlocal remaining
        remaining -= len(values) + 1
        if remaining < 0:
            raise ValueError(f"not a message of this protocol: more than {limit} values")
        return values

    return count


def to_record_batch(data: memoryview) -> pa.RecordBatch:
    """Return bytes as a record batch with one column, without a copy."""
    column = pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def from_record_batch(received: pa.RecordBatch) -> memoryview:
    """Return the bytes of a batch of `to_record_batch`, without a copy. Raises ValueError for another batch."""
    if received.num_columns != 1 or received.column(0).type != pa.uint8():
        raise ValueError("not a record batch of this protocol, which has one column of uint8")
    array = received.column(0)
    data = array.buffers()[1]
    if data is None:
        return memoryview(b"")
    return memoryview(data).cast("B")[array.offset : array.offset + len(array)]


def encode_error(error: CkptError) -> bytes:
    """Return an error as bytes: its class name and its message."""
    return pack([type(error).__name__, str(error)])


def decode_error(data: bytes) -> CkptError | None:
    """Return the error that the other side raised, or None if the bytes are not an error."""
    try:
        kind, message, *_ = map(str, unpack(data))
    except (ValueError, TypeError):
        return None
    error_class = getattr(errors, kind, StoreError)
    return error_class(message) if isinstance(error_class, type) and issubclass(error_class, CkptError) else StoreError(message)


# --- registers -------------------------------------------------------------------------------------------------


def encode_answers(answers: Sequence[RegisterAnswer]) -> list[object]:
    """Return the answers of registers as lists: [reason] for a damaged record, else [promised, accepted, value]."""
    return [
        [a.reason]
        if isinstance(a, DamagedRegister)
        else [list(a.promised_ballot), list(a.accepted_ballot), encode_value(a.value)]
        for a in answers
    ]


def decode_answers(data: Sequence[Any]) -> list[RegisterAnswer]:
    """Return the answers that `encode_answers` encoded. Raises TypeError or IndexError for other lists."""
    return [
        DamagedRegister(a[0])
        if len(a) == 1
        else Register(Ballot(*a[0]), Ballot(*a[1]), None if a[2] is None else RegisterValue(*a[2]))
        for a in data
    ]


def encode_value(value: RegisterValue | None) -> list[bytes] | None:
    """Return the value of a register as a list."""
    return None if value is None else [value.head, value.body]


def encode_changes(changes: Sequence[DirectChange]) -> list[object]:
    """Return changes of registers as lists."""
    return [[c.name, list(c.expected), encode_value(c.value)] for c in changes]


def decode_changes(data: Sequence[Any]) -> list[DirectChange]:
    """Return the changes that `encode_changes` encoded."""
    return [DirectChange(name, Ballot(*expected), RegisterValue(*value)) for name, expected, value in data]
