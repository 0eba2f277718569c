"""How a bucket stores registers: the names of their objects, and their bytes. Pure."""

from __future__ import annotations

import re

import msgpack
import xxhash

from ckpt.storage.base.errors import is_transient
from ckpt.storage.registers.base import (
    BODY_BYTES,
    DamagedRegister,
    Register,
    RegisterAnswer,
    RegisterValue,
    decode_ballot,
    encode_ballot,
    record_checksum,
    require_record_fits,
)

REGISTERS_FOLDER = "registers"

_KEY_BYTES = 900
_ESCAPED_CHARACTERS = re.compile(r"[^A-Za-z0-9.\-]")


def key_folders(prefix: str) -> list[str]:
    """Return the folders that may contain registers whose names begin with `prefix`."""
    if not prefix:
        return ["paths", "others", "long"]
    return ["paths", "long"] if prefix.startswith("/") else ["others", "long"]


def object_key(name: str) -> str:
    """Return the object name of a register; a byte that object names do not allow becomes _ and two hexadecimal digits."""
    folder = "paths" if name.startswith("/") else "others"
    parts = [_escape_segment(part) for part in name.removeprefix("/").split("/")]
    key = f"{REGISTERS_FOLDER}/{folder}/{'/'.join(parts)}"
    return key if len(key) <= _KEY_BYTES else f"{REGISTERS_FOLDER}/long/{xxhash.xxh3_128_hexdigest(name.encode())}"


def register_name(key: str) -> str:
    """Return the register name of an object name; "" for a long name, of which the object name has only a hash."""
    folder, _, rest = key.removeprefix(f"{REGISTERS_FOLDER}/").partition("/")
    plain = re.sub(rb"_([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), rest.encode()).decode("utf-8", "replace")
    return {"paths": f"/{plain}", "others": plain}.get(folder, "")


def _escape_segment(part: str) -> str:
    plain = _ESCAPED_CHARACTERS.sub(lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), part)
    return f"_2e{plain[1:]}" if plain.startswith(".") else plain


def encode_register(name: str, record: Register) -> bytes:
    """Return a register as bytes, with its name and a checksum."""
    value = record.value
    require_record_fits(name, value)
    promised, accepted = encode_ballot(record.promised_ballot), encode_ballot(record.accepted_ballot)
    packed: bytes = msgpack.packb(
        [name, promised, accepted, value and [value.head, value.body], record_checksum(name, promised, accepted, value)]
    )
    return packed


def decode_register(data: bytes) -> tuple[str, RegisterAnswer]:
    """Return the name and the record; the name is "" if it cannot be read."""
    name = ""
    try:
        name, promised, accepted, given, total = msgpack.unpackb(data, max_bin_len=2 * BODY_BYTES)
        value = None if given is None else RegisterValue(*given)
        if record_checksum(name, promised, accepted, value) == total:
            return name, Register(decode_ballot(promised), decode_ballot(accepted), value)
    except Exception as error:  # msgpack raises errors of many types for other bytes
        if is_transient(error):
            raise
        return str(name), DamagedRegister("it can't be read")
    return name, DamagedRegister("its checksum does not match")
