"""Writes indexes of TensorFlow, which are tables of LevelDB with messages of protocol buffers, without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.tools.import_leveldb import crc32c

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")


def _varint(number: int) -> bytes:
    data = b""
    while number > 0x7F:
        data += bytes([number & 0x7F | 0x80])
        number >>= 7
    return data + bytes([number])


def encode_message(fields: dict[int, Any]) -> bytes:
    """Return a message: whole numbers, text, bytes and messages by the number of the field; a list is a repeated field."""
    data = b""
    for field, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, int) and value >= 0:
                data += _varint(field << 3) + _varint(value)
            else:
                part = encode_message(value) if isinstance(value, dict) else value.encode() if isinstance(value, str) else value
                data += _varint(field << 3 | 2) + _varint(len(part)) + part
    return data


def _block(entries: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, int]:
    """Return a block with its checksum, and its length without that."""
    parts = (_varint(0) + _varint(len(key)) + _varint(len(value)) + key + value for key, value in entries)
    body = b"".join(parts) + bytes(4) + (1).to_bytes(4, "little")
    crc = crc32c(body + b"\0")
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    return body + b"\0" + masked.to_bytes(4, "little"), len(body)


def encode_index(entries: dict[str, dict[int, Any]]) -> bytes:
    """Return an index of these messages by name."""
    table, table_length = _block(sorted((name.encode(), encode_message(fields)) for name, fields in entries.items()))
    meta, meta_length = _block([])
    handles, handles_length = _block([(b"\xff", _varint(0) + _varint(table_length))])
    footer = b"".join(map(_varint, (len(table), meta_length, len(table) + len(meta), handles_length)))
    return table + meta + handles + footer.ljust(40, b"\0") + _MAGIC
