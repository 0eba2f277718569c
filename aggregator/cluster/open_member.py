"""The connection to one member, with the same calls for a node, a directory and a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt.aggregator.cluster.config import Member
from ckpt.storage.base.store import Store
from ckpt.storage.member.damaged_ranges import ChecksummedRange
from ckpt.storage.member.device import Device, MemberInfo
from ckpt.storage.member.inventory import Inventory, InventoryPart, read_all_parts
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.registers.base import Registers

if TYPE_CHECKING:
    from ckpt.storage.member.bucket import Bucket
    from ckpt.storage.node.client import NodeStore


class OpenMember:
    """One open member. Records refer to it by its `name`."""

    def __init__(self, member: Member, credentials: NodeCredentials) -> None:
        self.member = member
        self.name = member.name
        self.store: Store
        self.registers: Registers
        if member.address is not None:
            from ckpt.storage.node.client import NodeStore  # imports Arrow Flight, which directories do not need

            self._device: NodeStore | Bucket | Device = NodeStore(member.address, credentials)
            self.store = self._device
        elif member.bucket is not None:
            from ckpt.storage.member.bucket import Bucket  # imports obstore

            self._device = Bucket(member.bucket)
            self.store = self._device.store
        else:
            assert member.folder is not None
            self._device = Device(member.folder, needs_parent=True)
            self.store = self._device.store
        self.registers = self._device.registers

    def info(self) -> MemberInfo:
        """Return the identity and the state of the member."""
        return self._device.info()

    def verify(self, name: str, ranges: Sequence[ChecksummedRange]) -> Sequence[int]:
        """Return the indices of the damaged ranges of an object. Raises NotFound, and StoreError if they can't be read."""
        return self._device.verify(name, ranges)

    def inventory(self) -> Inventory:
        """Return the length of every object in bytes, and the seconds since it was written or named, by name."""
        return read_all_parts(self.inventory_part)

    def inventory_part(self, after: str) -> InventoryPart:
        """Return the objects of the folders after `after` that the member can list in a few seconds."""
        return self._device.inventory_part(after)

    def link(self, name: str, to: str) -> None:
        """Give an object a second name, durably. Raises NotFound."""
        self._device.link(name, to)

    def sweep(self, older_seconds: float) -> None:
        """Remove the unfinished objects of dead writers, from this age on. A node does so itself."""
        if self.member.address is None:
            self._device.sweep(older_seconds)  # type: ignore[union-attr]

    def quarantine(self, name: str) -> None:
        """Move a damaged object to where no reader finds it."""
        self._device.quarantine(name)

    def close(self) -> None:
        self._device.close()
