"""A member that is open: its objects, its registers, and the few things that a directory does as a node does them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt.aggregator.cluster.config import Member
from ckpt.storage.base.store import Store
from ckpt.storage.member.device import Device, MemberInfo
from ckpt.storage.node.credentials import NodeCredentials
from ckpt.storage.registers.base import Registers

if TYPE_CHECKING:
    from ckpt.storage.member.bucket import Bucket
    from ckpt.storage.node.client import NodeStore


class OpenMember:
    """One member. `name` is what records call it."""

    def __init__(self, member: Member, credentials: NodeCredentials) -> None:
        self.member = member
        self.name = member.name
        self.store: Store
        self.registers: Registers
        if member.address is not None:
            from ckpt.storage.node.client import NodeStore  # with Arrow Flight: not for directories

            self._device: NodeStore | Bucket | Device = NodeStore(member.address, credentials)
            self.store = self._device
        elif member.bucket is not None:
            from ckpt.storage.member.bucket import Bucket  # with obstore

            self._device = Bucket(member.bucket)
            self.store = self._device.store
        else:
            assert member.folder is not None
            self._device = Device(member.folder)
            self.store = self._device.store
        self.registers = self._device.registers

    def info(self) -> MemberInfo:
        """Who it is and how it is."""
        return self._device.info()

    def verify(self, name: str, ranges: Sequence[tuple[int, int, bytes]]) -> Sequence[int]:
        """Which ranges (position, length, checksums) of an object are damaged."""
        return self._device.verify(name, ranges)

    def inventory(self) -> dict[str, tuple[int, float]]:
        """Length of every object, and the seconds since it was made durable."""
        return self._device.inventory()

    def link(self, name: str, to: str) -> None:
        """Give an object a second name, durably. Raises NotFound."""
        self._device.link(name, to)

    def sweep(self, older_seconds: float) -> None:
        """Remove what dead writers left half-written. A node does so itself."""
        if self.member.address is None:
            self._device.sweep(older_seconds)  # type: ignore[union-attr]

    def quarantine(self, name: str) -> None:
        """Put a damaged object where no reader finds it."""
        self._device.quarantine(name)

    def close(self) -> None:
        self._device.close()
