"""The class InventoryVerbs, which answers the calls of a node for the list of its objects."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt.storage.member.device import Device
from ckpt.storage.member.inventory import Inventory

_ENTRIES = 5_000
"""The most objects of one message."""


class InventoryVerbs:
    """Lists the objects of the device of a node. A message has name, length in bytes, and age in seconds of each object."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def _verb_inventory(self) -> Iterator[list[list[object]]]:
        """Yield all objects, for older clients. The call takes too long if there are millions of objects."""
        yield from _messages(self._device.inventory())

    def _verb_inventory_part(self, after: str, seconds: float) -> Iterator[list[list[object]] | str | None]:
        """Yield the objects of the folders after `after`, and then the folder after which the next part begins, or None."""
        part = self._device.inventory_part(after, seconds)
        yield from _messages(part.objects)
        yield part.last_folder


def _messages(objects: Inventory) -> Iterator[list[list[object]]]:
    entries: list[list[object]] = [[name, *found] for name, found in objects.items()]
    for start in range(0, max(1, len(entries)), _ENTRIES):
        yield entries[start : start + _ENTRIES]
