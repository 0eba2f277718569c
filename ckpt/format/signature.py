"""Keys and signatures: what protects a step against somebody who may write to the repository.

The commit record names manifest and tree by their blake3 digests, the manifest names every block by its blake3 digest, and the
signature in the commit record is an HMAC of that record. So the signature covers every byte of the step. Without a key,
digests only find what changed by accident: whoever changes a file can change the digests too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.errors import SignatureError
from ckpt.storage.base.errors import InvalidArgument

KEY_FILE_VARIABLE = "CKPT_KEY_FILE"
"""The environment variable that names the key file where the program names none."""

KeyOption = str | os.PathLike[str] | bytes | None
"""What a user gives as a key: a key file, the key itself, or nothing."""

_MIN_KEY_BYTES = 32
_HOW_TO_MAKE_ONE = "`openssl rand -hex 32` makes one"
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")


@dataclass(frozen=True, slots=True)
class Key:
    """A secret, and the number by which records name it."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """16 hexadecimal digits, from which the secret cannot be computed."""
        return hmac.digest(self.secret, b"ckpt key id", hashlib.sha256).hex()[:16]

    def code(self, purpose: str, data: bytes) -> str:
        """HMAC-SHA256 of the data for one purpose, as hexadecimal digits."""
        mac = hmac.new(self.secret, f"ckpt {purpose} 1\n".encode(), hashlib.sha256)
        mac.update(data)
        return mac.hexdigest()


@dataclass(frozen=True, slots=True)
class Signature:
    """Who signed, and the proof."""

    key: str
    """The id of the key."""
    hmac_sha256: str


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that a process was given: the first one signs, a signature by any of them is accepted."""

    keys: tuple[Key, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys)

    def sign(self, purpose: str, data: bytes) -> Signature | None:
        """The signature of the first key; None where there is no key."""
        return Signature(self.keys[0].id, self.keys[0].code(purpose, data)) if self.keys else None

    def check(self, purpose: str, data: bytes, signature: Signature | None, where: str) -> None:
        """Raise SignatureError unless one of the keys made the signature. Without keys nothing is checked."""
        if not self.keys:
            return
        if signature is None:
            raise SignatureError(
                f"{where} has no signature, and a key was given: it was saved without a key, or somebody who may write there "
                f"removed the signature. A step of yours that was saved without a key: load it without one (key=None, no "
                f"{KEY_FILE_VARIABLE}) and save it with the key to a new URL"
            )
        key = next((key for key in self.keys if key.id == signature.key), None)
        if key is None:
            given = ", ".join(key.id for key in self.keys)
            raise SignatureError(
                f"{where} is signed with key {signature.key}, and the keys that were given are {given}: add that key to the "
                "key file if it is one of yours, else load another step"
            )
        if not hmac.compare_digest(key.code(purpose, data), signature.hmac_sha256):
            raise SignatureError(
                f"{where} is not what was signed with key {key.id}: it was changed afterwards; restore the file from a "
                "copy, or load another step"
            )


NO_KEYS = Keys()


def as_keys(option: KeyOption | Keys) -> Keys:
    """The keys that a user gives, or else the environment; raise InvalidArgument where they are of no use."""
    if isinstance(option, Keys):
        return option
    if isinstance(option, bytes):
        return Keys((_checked_key(option, "key="),))
    if option is not None:
        return read_key_file(Path(option))
    return read_key_file(Path(named)) if (named := os.environ.get(KEY_FILE_VARIABLE)) else NO_KEYS


def read_key_file(file: Path) -> Keys:
    """The keys in a file: one a line, in hexadecimal digits. Empty lines and lines that begin with # do not count."""
    try:
        lines = [line.strip() for line in file.read_text("ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the key file {file} can't be read: {error}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            where = f"line {number} of the key file {file}"
            if not _HEX.fullmatch(line):  # the line may be a secret: it is not shown
                raise InvalidArgument(f"{where} is no key in hexadecimal digits; {_HOW_TO_MAKE_ONE}")
            keys.append(_checked_key(bytes.fromhex(line), where))
    if not keys:
        raise InvalidArgument(f"the key file {file} holds no key; {_HOW_TO_MAKE_ONE}")
    return Keys(tuple(keys))


def _checked_key(secret: bytes, where: str) -> Key:
    if len(secret) < _MIN_KEY_BYTES:
        raise InvalidArgument(
            f"{where}: a key has at least {_MIN_KEY_BYTES} bytes, this one has {len(secret)}; {_HOW_TO_MAKE_ONE}"
        )
    return Key(secret)
