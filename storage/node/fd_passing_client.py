"""The client side of descriptor passing: on the host of a node, a client reads and writes the files directly."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.storage.base.errors import CkptError, StoreError, Unavailable
from ckpt.storage.base.fd_io import AppendFile
from ckpt.storage.node import fd_passing_server, wire
from ckpt.storage.node.upload_renewal import RENEWALS_PER_LEASE, UploadWriter

if TYPE_CHECKING:
    from ckpt.storage.node.client import NodeStore

_RESERVE_AHEAD_BYTES = 64 << 20
"""The most bytes that are reserved ahead of the written ones; never more than the written ones themselves."""


class FdPassingClient:
    """Gets descriptors from a node, if it is on this host. It may be used from many threads."""

    def __init__(self, store: NodeStore, deadline_seconds: float) -> None:
        self._store = store
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        """Guards changes of `_address`, `_is_address_known` and `lease_seconds`. `_was_reached` only ever becomes True."""
        self.lease_seconds = wire.UPLOAD_LEASE_SECONDS
        """How long the node keeps an upload without a call."""
        self._is_address_known = False
        self._address: fd_passing_server.FdServerAddress | None = None
        self._was_reached = False

    def descriptors(self, verb: str, argument: str) -> list[int] | None:
        """Return descriptors, which the caller closes; None if the bytes must go over the wire.

        verb, argument: what to open, see `fd_passing_server`.

        Raises Unavailable if the node does not answer, and the error that it reports.
        """
        found = self._request(verb, argument)
        return None if found is None else found[1]

    def create(self, key: str, size_hint: int, where: str) -> UploadWriter | None:
        """Return a writer of an upload; None if its bytes must go over the wire.

        key: the key of the upload, which the node has created.
        size_hint: the bytes that the node has reserved.
        where: the URL of the object, for messages.

        Raises what `descriptors` raises; the upload is then discarded.
        """
        try:
            answer = self._request("append", key)
        except BaseException:
            with suppress(CkptError):  # the node discards the upload when its lease expires
                self._store.call("abort", key)
            raise
        if answer is None:
            return None
        address, found = answer
        file = AppendFile(found[0], found[1] if len(found) > 1 else None, where)
        renew_seconds = address.lease_seconds / RENEWALS_PER_LEASE
        return _FdUploadWriter(self._store, key, file, size_hint, renew_seconds, self._deadline_seconds)

    def _request(self, verb: str, argument: str) -> tuple[fd_passing_server.FdServerAddress, list[int]] | None:
        for _ in range(2):
            address = self._fetch_address()
            if address is None:
                return None
            try:
                found = fd_passing_server.request_descriptors(address, verb, argument, self._deadline_seconds)
            except TimeoutError as error:
                raise Unavailable(
                    f"{self._store.url} did not open {argument} within {self._deadline_seconds:g} s; check that it runs"
                ) from error
            except ConnectionError:
                self._forget_address(address)
            except OSError:
                return None
            except CkptError as error:
                raise type(error)(f"{self._store.url}: {error}") from error
            else:
                self._was_reached = True
                return address, found
        return None

    def _fetch_address(self) -> fd_passing_server.FdServerAddress | None:
        if not self._is_address_known:
            fields = self._store.call("near")
            with self._lock:
                self._address = (
                    None if fields is None or sys.platform != "linux" else fd_passing_server.FdServerAddress(*fields)
                )
                self._is_address_known = True
                if self._address is not None:
                    self.lease_seconds = self._address.lease_seconds
        return self._address

    def _forget_address(self, address: fd_passing_server.FdServerAddress) -> None:
        """Forget an address at which no node listens.

        If the node was reached before, it may have restarted, so the address is fetched again. Otherwise it is on another host.
        """
        with self._lock:
            if self._address is address:
                self._is_address_known, self._address = not self._was_reached, None


class _FdUploadWriter(UploadWriter):
    """Writes an upload directly to its file. It calls the node to reserve space, to renew the lease, and at the end.

    Threads that append, and the thread that renews leases, set `_reserved_bytes` and `_renewed_at` without a lock. An older
    value costs one more call, and none is above what the node has reserved.

    reserved: the bytes that the node has reserved.
    renew_seconds: the time between two renewals of the lease.
    """

    def __init__(
        self, store: NodeStore, key: str, file: AppendFile, reserved: int, renew_seconds: float, deadline_seconds: float
    ) -> None:
        self._store = store
        self._key = key
        self._file = file
        self._reserved_bytes = reserved
        self._renew_seconds = renew_seconds
        self._deadline_seconds = deadline_seconds
        self._renewed_at = time.monotonic()
        self._is_open = True

    def append(self, data: memoryview) -> int:
        data = data.cast("B")
        with self._file.reserve_range(len(data)) as position:
            self._reserve_and_renew(position + len(data))
            self._file.write(data, position)
            self._reserve_and_renew(0)
        return position

    def _reserve_and_renew(self, end: int) -> None:
        """Reserve the space up to `end`, and renew the lease of the upload, if necessary."""
        if end > self._reserved_bytes or time.monotonic() > self._renewed_at + self._renew_seconds:
            found: int = self._store.call("reserve", self._key, end, end + min(end, _RESERVE_AHEAD_BYTES))
            self._reserved_bytes = max(self._reserved_bytes, found)
            self._renewed_at = time.monotonic()

    def renew(self) -> None:
        self._reserve_and_renew(0)

    def commit(self) -> int:
        if not self._file.close(self._deadline_seconds):
            raise Unavailable(f"{self._store.url}: an append has not ended in {self._deadline_seconds:g} s; check the disk")
        length: int = self._store.call("commit", self._key, self._file.length)
        self._end()
        return length

    def _end(self) -> None:
        self._is_open = False
        self._store.upload_renewal.remove(self)

    def abort(self) -> None:
        self._file.close()
        if self._is_open:
            self._end()
            with suppress(StoreError):  # the node discards the upload when its lease expires
                self._store.call("abort", self._key)
