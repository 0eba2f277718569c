"""The objects from which a rebuild reads fragments, each opened once."""

from __future__ import annotations

import threading

import numpy as np

from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.records.file_record import Fragment, MemberObject
from ckpt.storage.base.checksums import find_bad_cells
from ckpt.storage.base.errors import IntegrityError, StoreError, Unavailable
from ckpt.storage.base.store import Reader


class SourceObjects:
    """The objects that are read, each opened once. Safe to use from many threads."""

    def __init__(self, member_io: MemberIO) -> None:
        self._member_io = member_io
        self.url = member_io.url
        """The URL of the namespace, for messages."""
        self._lock = threading.Lock()
        """Guards changes of `_readers`. It is held while an object is opened, so that each is opened once."""
        self._readers: dict[MemberObject, Reader] = {}

    def is_down(self, member_object: MemberObject) -> bool:
        """Return whether the member of an object is down, so that a read of it may wait for the deadline."""
        return self._member_io.fan_out.health.is_down(member_object.member)

    def read(self, member_object: MemberObject, fragment: Fragment, data: np.ndarray) -> None:
        """Fill `data` with a fragment, and verify it. Raises StoreError, and IntegrityError if it is damaged.

        A member that does not answer counts as down.
        """
        try:
            self._read(member_object, fragment, data)
        except Unavailable as error:
            self._member_io.fan_out.health.record_failure(member_object.member, error)
            raise

    def _read(self, member_object: MemberObject, fragment: Fragment, data: np.ndarray) -> None:
        open_member = self._member_io.open_members.get(member_object.member)
        if open_member is None:
            raise StoreError("it is not a member any more")
        with self._lock:
            reader = self._readers.get(member_object)
            if reader is None:
                reader = self._readers[member_object] = open_member.store.open(member_object.name)
        if reader.read_into(fragment.position, data.data) < len(data):
            raise IntegrityError(f"{member_object.name} is truncated")
        if find_bad_cells(data.data, fragment.cell_checksums):
            raise IntegrityError(f"{member_object.name} is damaged")

    def close(self) -> None:
        """Close the objects that were opened."""
        for reader in self._readers.values():
            reader.close()
