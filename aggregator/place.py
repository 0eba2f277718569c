"""A member that is open: its objects, its registers, and the few things that a directory does as a node does them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt.aggregator.members import Member
from ckpt.storage.access import Access
from ckpt.storage.base import Store
from ckpt.storage.device import Device, Info
from ckpt.storage.registers import Registers

if TYPE_CHECKING:
    from ckpt.storage.bucket import Bucket
    from ckpt.storage.client import NodeStore


class Place:
    """One member. `name` is what records call it."""

    def __init__(self, member: Member, access: Access) -> None:
        self.member = member
        self.name = member.name
        self.store: Store
        self.registers: Registers
        if member.address is not None:
            from ckpt.storage.client import NodeStore  # with Arrow Flight: not for directories

            self._node: NodeStore | Bucket | Device = NodeStore(member.address, access)
            self.store = self._node
        elif member.bucket is not None:
            from ckpt.storage.bucket import Bucket  # with obstore

            self._node = Bucket(member.bucket)
            self.store = self._node.store
        else:
            assert member.folder is not None
            self._node = Device(member.folder)
            self.store = self._node.store
        self.registers = self._node.registers

    def info(self) -> Info:
        """Who it is and how it is."""
        return self._node.info()

    def verify(self, name: str, ranges: Sequence[tuple[int, int, bytes]]) -> Sequence[int]:
        """Which ranges (position, length, checksums) of an object are damaged."""
        return self._node.verify(name, ranges)

    def inventory(self) -> dict[str, tuple[int, float]]:
        """Length of every object, and the seconds since it was made durable."""
        return self._node.inventory()

    def link(self, name: str, to: str) -> None:
        """Give an object a second name, durably. Raises NotFound."""
        self._node.link(name, to)

    def sweep(self, older_seconds: float) -> None:
        """Remove what dead writers left half-written. A node does so itself."""
        if self.member.address is None:
            self._node.sweep(older_seconds)  # type: ignore[union-attr]

    def quarantine(self, name: str) -> None:
        """Put a damaged object where no reader finds it."""
        self._node.quarantine(name)

    def close(self) -> None:
        self._node.close()
