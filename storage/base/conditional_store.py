"""Stores whose server replaces an object only as it was read: buckets (If-Match), a namespace (compare and set of records).

A publication in such a store is two conditional puts. The first takes the free name with a reservation, which no reader
takes for an object; the second replaces the reservation. The lease of the writer is confirmed in between. So a successor that
replaces the reservation, after it has taken the lease, knows that the second put of its predecessor fails, however late.

A publication in place of an object that is there needs no reservation: the object itself is what the put is conditional upon.

A reservation that was revoked stays as a few bytes: a delete has no condition, and could remove what came meanwhile.
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
_MAX_TRIES = 20


def new_reservation() -> bytes:
    """The content of a reservation, which no other one has."""
    return _RESERVATION_PREFIX + secrets.token_hex(16).encode()


def is_reservation(data: bytes) -> bool:
    """Whether an object only keeps its name for a publication that is under way, or was given up."""
    return len(data) == RESERVATION_BYTES and data.startswith(_RESERVATION_PREFIX)


class ConditionalStore(Store):
    """A store with conditional puts."""

    fences = True

    _unused_version: Version
    """A version that no object has."""

    @abstractmethod
    def _read(self, name: str, limit: int | None = None) -> tuple[bytes, Version]:
        """What lies at `name`, also a reservation; raises NotFound, IntegrityError where it is longer than `limit`."""

    @abstractmethod
    def _compare_and_swap(self, name: str, data: Buffer, expected: Version | None) -> Version | None:
        """Replace an object only if it still is as expected (None: if there is none). Its new version, None where it was not.

        None may hide a put that came through, was not answered and was tried again: read it to know.
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
        for _ in range(_MAX_TRIES):
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
        for _ in range(_MAX_TRIES):
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
        """Whether there is nothing but a reservation. Raises NotFound."""
        try:
            return is_reservation(self._read(name, RESERVATION_BYTES)[0])
        except IntegrityError:  # replaced meanwhile by something longer
            return False
