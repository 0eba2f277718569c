"""Keys and signatures, which protect a step against an attacker who can write to the repository.

The commit record contains the blake3 digests of manifest and tree, the manifest contains the blake3 digest of every block, and
the signature in the commit record is an HMAC of that record. So the signature covers every byte of the step. Without a key,
digests only detect accidental changes: an attacker who changes a file can change the digests too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.errors import DAMAGE_ADVICE, SignatureError
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.base.fd_io import describe_unreadable_file

KEY_FILE_VARIABLE = "CKPT_KEY_FILE"
"""The environment variable that names the key file if the program does not."""

KeyOption = str | os.PathLike[str] | bytes | bytearray | memoryview | None
"""The `key=` option: a key file, the key itself as bytes, or None."""

_MIN_KEY_BYTES = 32
_HOW_TO_MAKE_ONE = "`openssl rand -hex 32` makes one"
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")


@dataclass(frozen=True, slots=True)
class Key:
    """A secret key, and the id by which records name it."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """16 hexadecimal digits, from which the secret cannot be computed."""
        return hmac.digest(self.secret, b"ckpt key id", hashlib.sha256).hex()[:16]

    def code(self, purpose: str, data: bytes) -> str:
        """Return the HMAC-SHA256 of the data for one purpose, as hexadecimal digits."""
        mac = hmac.new(self.secret, f"ckpt {purpose} 1\n".encode(), hashlib.sha256)
        mac.update(data)
        return mac.hexdigest()


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature: the id of the key, and the HMAC."""

    key: str
    """The id of the key."""
    hmac_sha256: str


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a process: the first one signs, and a signature by any of them is accepted."""

    keys: tuple[Key, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys)

    def sign(self, purpose: str, data: bytes) -> Signature | None:
        """Return the signature by the first key; None if there is no key."""
        return Signature(self.keys[0].id, self.keys[0].code(purpose, data)) if self.keys else None

    def check(self, purpose: str, data: bytes, signature: Signature | None, where: str) -> None:
        """Raise SignatureError unless one of the keys made the signature. Without keys nothing is checked.

        where: the signed file, for messages.
        """
        if not self.keys:
            return
        if signature is None:
            raise SignatureError(
                f"{where} has no signature, although a key was given; if you trust it, load it without a key (key=None, no "
                f"{KEY_FILE_VARIABLE}) and save it signed to a new URL"
            )
        key = next((key for key in self.keys if key.id == signature.key), None)
        if key is None:
            given = ", ".join(key.id for key in self.keys)
            raise SignatureError(
                f"{where} is signed with key {signature.key}, which is not among the given keys {given}: add that key to the "
                "key file if it is one of yours, else load another step"
            )
        if not hmac.compare_digest(key.code(purpose, data), signature.hmac_sha256):
            raise SignatureError(f"{where} was changed after it was signed with key {key.id}: {DAMAGE_ADVICE}")


NO_KEYS = Keys()


def as_keys(option: KeyOption | Keys) -> Keys:
    """Return the keys of a `key=` option, or else of the environment; raise InvalidArgument for an invalid file or key."""
    if isinstance(option, Keys):
        return option
    if isinstance(option, (bytes, bytearray, memoryview)):
        return Keys((_checked_key(bytes(option), "key="),))
    if isinstance(option, (str, os.PathLike)):
        return read_key_file(Path(option))
    if option is not None:
        raise InvalidArgument(f"key= is a {type(option).__name__}; give the path of a key file, or the key as bytes")
    return read_key_file(Path(named)) if (named := os.environ.get(KEY_FILE_VARIABLE)) else NO_KEYS


def read_key_file(file: Path) -> Keys:
    """Return the keys in a file.

    Each line is one key in hexadecimal digits. Empty lines and lines that begin with # are ignored. Raises InvalidArgument if
    the file can't be read, or a line is not a key.
    """
    try:
        lines = [line.strip() for line in file.read_text("ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"the key file {file} can't be read: {describe_unreadable_file(error)} (key=, --key-file or {KEY_FILE_VARIABLE})"
        ) from error
    keys = []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            where = f"line {number} of the key file {file}"
            if not _HEX.fullmatch(line):  # the message must not show the line, which may be a secret
                raise InvalidArgument(f"{where} is not a key in hexadecimal digits; {_HOW_TO_MAKE_ONE}")
            keys.append(_checked_key(bytes.fromhex(line), where))
    if not keys:
        raise InvalidArgument(f"the key file {file} has no key; {_HOW_TO_MAKE_ONE}")
    return Keys(tuple(keys))


def _checked_key(secret: bytes, where: str) -> Key:
    if len(secret) < _MIN_KEY_BYTES:
        raise InvalidArgument(
            f"{where}: a key has at least {_MIN_KEY_BYTES} bytes, this one has {len(secret)}; {_HOW_TO_MAKE_ONE}"
        )
    return Key(secret)
