"""Signs the entries and reports of a run with the token of the job, as others may write to the same etcd.

A signed value is `hmac-sha256 <64 hexadecimal digits> <JSON>`. The HMAC covers the bytes of the JSON and the key under which
the value is stored. The key contains the name of the job and the number of the entry or the name of the agent. So a value is
valid only under its own key, and only if its writer knows the token.
"""

from __future__ import annotations

import hashlib
import hmac

_PREFIX = b"hmac-sha256 "
_DIGITS = 64
_PURPOSE = b"ckpt-run log 1"
"""The purpose in the derivation of the key, so that other uses of the token have other keys."""


class UntrustedValue(ValueError):
    """A value has no signature, or one of another token. The message names which."""


class Signer:
    """Signs values and verifies them. With token None it signs nothing and accepts only unsigned values."""

    def __init__(self, token: str | None) -> None:
        self._key = hmac.digest(token.encode(), _PURPOSE, hashlib.sha256) if token else None

    @property
    def has_token(self) -> bool:
        """Whether values are signed."""
        return self._key is not None

    def sign(self, key: str, value: bytes) -> bytes:
        """Return the bytes to store under a key."""
        return value if self._key is None else _PREFIX + self._hex_digest(self._key, key, value) + b" " + value

    def verify(self, key: str, stored: bytes) -> bytes:
        """Return the value of the bytes stored under a key. Raises UntrustedValue."""
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
    """Return the value of stored bytes without verifying the signature."""
    return stored[len(_PREFIX) + _DIGITS + 1 :] if stored.startswith(_PREFIX) else stored
