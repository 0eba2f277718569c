"""Signatures of what the agents of a run write to a place where others may write, by the token of the job.

A signed value is `hmac-sha256 <64 hexadecimal digits> <JSON>`. The HMAC covers the key under which the value is stored, which
holds the name of the job and the number of the entry (or the name of the agent), and the JSON as it stands. So a value counts
only in its place, and only if it was written by somebody who knows the token.
"""

from __future__ import annotations

import hashlib
import hmac

_PREFIX = b"hmac-sha256 "
_DIGITS = 64
_PURPOSE = b"ckpt-run log 1"
"""What keeps these signatures apart from other uses of the token."""


class UntrustedValue(ValueError):
    """A value has no signature, or not that of the token. The message says which."""


class Signer:
    """Signs values and checks them. token: None signs nothing and accepts only what is not signed."""

    def __init__(self, token: str | None) -> None:
        self._key = hmac.digest(token.encode(), _PURPOSE, hashlib.sha256) if token else None

    @property
    def has_token(self) -> bool:
        """Whether there is a token."""
        return self._key is not None

    def sign(self, key: str, value: bytes) -> bytes:
        """What to store under a key."""
        return value if self._key is None else _PREFIX + self._hex_digest(self._key, key, value) + b" " + value

    def verify(self, key: str, stored: bytes) -> bytes:
        """The value of what is stored under a key. Raises Unsigned."""
        if self._key is None:
            if stored.startswith(_PREFIX):
                raise UntrustedValue("it is signed, and there is no token to check it with")
            return stored
        if not stored.startswith(_PREFIX):
            raise UntrustedValue("it is not signed with the token of the job")
        value = strip_signature(stored)
        if not hmac.compare_digest(stored[len(_PREFIX) : len(_PREFIX) + _DIGITS], self._hex_digest(self._key, key, value)):
            raise UntrustedValue("its signature is not that of the token of the job")
        return value

    def _hex_digest(self, mac_key: bytes, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.new(mac_key, len(name).to_bytes(4, "big") + name + value, hashlib.sha256).hexdigest().encode()


def strip_signature(stored: bytes) -> bytes:
    """The value of what is stored, whoever wrote it."""
    return stored[len(_PREFIX) + _DIGITS + 1 :] if stored.startswith(_PREFIX) else stored
