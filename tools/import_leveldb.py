"""Reads tables of LevelDB, and messages of protocol buffers by the numbers of their fields."""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
"""Behind each block: its compression, and a checksum."""
_CRC_MASK = 0xA282EAD8


def read_leveldb(path: Path) -> dict[bytes, bytes]:
    """Return all entries of a table; raise ValueError, LookupError or struct.error for one that is damaged or compressed."""
    data = path.read_bytes()
    footer = data[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("it is not a table of LevelDB")
    meta, at = _read_handle(footer, 0)
    index, _ = _read_handle(footer, at)
    _block(data, meta)
    found: dict[bytes, bytes] = {}
    for _, handle in _entries(_block(data, index)):
        found.update(_entries(_block(data, _read_handle(handle, 0)[0])))
    return found


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of variable length, and where the next byte is."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than ten bytes")


def parse_fields(data: bytes) -> dict[int, list[int | bytes]]:
    """Return the values of a message by the number of the field: integers, and the bytes of strings and messages."""
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        value: int | bytes
        if tag & 7 == 0:
            value, at = read_varint(data, at)
        elif tag & 7 in (1, 5):
            size = 8 if tag & 7 == 1 else 4
            value, at = int.from_bytes(_exactly(data, at, size), "little"), at + size
        elif tag & 7 == 2:
            size, at = read_varint(data, at)
            value, at = _exactly(data, at, size), at + size
        else:
            raise ValueError(f"a field of the type {tag & 7}")
        found.setdefault(tag >> 3, []).append(value)
    return found


def _exactly(data: bytes, at: int, size: int) -> bytes:
    part = data[at : at + size]
    if len(part) != size:
        raise ValueError("it ends in the middle of an entry")
    return part


def _read_handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Return the offset and size of a block, and where the next byte is."""
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at


def _block(data: bytes, handle: tuple[int, int]) -> bytes:
    """Return the contents of a block, after a check of its checksum."""
    offset, size = handle
    whole = _exactly(data, offset, size + _TRAILER_BYTES)
    (expected,) = struct.unpack("<I", whole[-4:])
    rotated = (expected - _CRC_MASK) & 0xFFFFFFFF
    if crc32c(whole[:-4]) != ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF:
        raise ValueError(f"the block at byte {offset} does not match its checksum")
    if whole[size] != 0:
        raise ValueError(f"the block at byte {offset} is compressed")
    return whole[:size]


def _entries(block: bytes) -> list[tuple[bytes, bytes]]:
    """Return the keys and values of a block. A key begins with bytes of the key before it."""
    (restarts,) = struct.unpack("<I", block[-4:])
    end = len(block) - 4 - 4 * restarts
    found, key, at = [], b"", 0
    while at < end:
        shared, at = read_varint(block, at)
        own, at = read_varint(block, at)
        size, at = read_varint(block, at)
        key = key[:shared] + _exactly(block, at, own)
        at += own
        found.append((key, _exactly(block, at, size)))
        at += size
    return found


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of bytes. It takes a second for 10 MB, so it is for indexes."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC_TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF
