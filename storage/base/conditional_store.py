"""Base class of stores with conditional puts: buckets (If-Match) and namespaces (compare and set of records).

To publish a new object takes two conditional puts. The first creates a reservation under the name, which readers do not treat
as an object; the second replaces the reservation. The writer lease is confirmed between the two. A successor that has taken the
lease replaces the reservation, and then the second put of its predecessor fails, however late it arrives.

To replace an existing object needs no reservation, since the put is conditional on the object itself.

A revoked reservation stays as an object of a few bytes: a delete has no condition, and could delete a newer object.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress

from ckpt.storage.base.errors import AlreadyExists, Changed, IntegrityError, NotFound, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import PROBE_BYTES, Buffer, Store, Version

_RESERVATION_PREFIX = b"ckpt reservation "
RESERVATION_BYTES = len(_RESERVATION_PREFIX) + 32
MAX_TRIES = 20
"""How often a conditional write is tried again after another writer has changed the object."""


def new_reservation() -> bytes:
    """Return the content of a new reservation, different from any other."""
    return _RESERVATION_PREFIX + secrets.token_hex(16).encode()


def is_reservation(data: bytes) -> bool:
    """Return whether an object is a reservation, of a publication that is running or was given up."""
    return len(data) == RESERVATION_BYTES and data.startswith(_RESERVATION_PREFIX)


class ConditionalStore(Store):
    """A store with conditional puts."""

    fences = True

    _unused_version: Version
    """A version that no object has."""

    @abstractmethod
    def _read(self, name: str, limit: int | None = None) -> tuple[bytes, Version]:
        """Return content and version of an object or reservation; raise NotFound, and IntegrityError beyond `limit` bytes."""

    @abstractmethod
    def _compare_and_swap(self, name: str, data: Buffer, expected: Version | None) -> Version | None:
        """Replace an object only if it has the expected version (None: only if it does not exist).

        Returns the new version, or None if the condition did not hold. None is also returned if a put succeeded without an
        answer and was repeated; the caller must read the object to know.
        """

    def get_versioned(self, name: str, limit: int) -> tuple[bytes, Version]:
        return self._read_object(name, limit)

    def _read_object(self, name: str, limit: int | None) -> tuple[bytes, Version]:
        data, version = self._read(name, limit)
        if is_reservation(data):
            raise NotFound(f"reading {self.url}/{name}: no such object")
        return data, version

    def get(self, name: str) -> bytes:
        return self._read_object(name, None)[0]

    def get_up_to(self, name: str, limit: int) -> bytes:
        return self._read_object(name, limit)[0]

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        version = replaces if replaces is not None else self._reserve(name)
        try:
            confirm()
        except BaseException:
            if replaces is None:
                with suppress(StoreError):
                    self._compare_and_swap(name, new_reservation(), version)
            raise
        failpoint("conditional.publish")
        if self._compare_and_swap(name, data, version) is None and not self._has_content(name, data):
            raise Changed(f"publishing {self.url}/{name}: another writer has changed it meanwhile")

    def revoke(self, name: str) -> bool:
        mark = new_reservation()
        for _ in range(MAX_TRIES):
            try:
                current, version = self._read(name, RESERVATION_BYTES)
            except NotFound:
                return True
            except IntegrityError:  # longer than any reservation
                return False
            if not is_reservation(current):
                return False
            if current == mark or self._compare_and_swap(name, mark, version) is not None:
                return True
        raise Unavailable(f"{self.url}/{name} changes all the time; try again")

    def honours_conditions(self, name: str) -> bool:
        return (
            super().honours_conditions(name)
            and self._compare_and_swap(name, self.get_up_to(name, PROBE_BYTES), self._unused_version) is None
        )

    def _reserve(self, name: str) -> Version:
        mark = new_reservation()
        expected: Version | None = None
        for _ in range(MAX_TRIES):
            if (version := self._compare_and_swap(name, mark, expected)) is not None:
                return version
            try:
                current, expected = self._read(name, RESERVATION_BYTES)
            except NotFound:
                expected = None
                continue
            except IntegrityError:
                current = b""  # longer than any reservation
            if current == mark:
                return expected
            if not is_reservation(current):
                raise AlreadyExists(f"publishing {self.url}/{name}: it exists already")
        raise Unavailable(f"{self.url}/{name} changes all the time; try again")

    def _has_content(self, name: str, data: Buffer) -> bool:
        try:
            return self._read(name, len(bytes(data)))[0] == bytes(data)
        except (NotFound, IntegrityError):
            return False

    def _is_reserved(self, name: str) -> bool:
        """Return whether the object is a reservation; raise NotFound."""
        try:
            return is_reservation(self._read(name, RESERVATION_BYTES)[0])
        except IntegrityError:  # a longer object
            return False
