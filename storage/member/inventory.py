"""The list of all objects of a member, read in parts, so that no call takes long if there are millions of objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Inventory = dict[str, tuple[int, float]]
"""The length in bytes and the age in seconds of each object, by name."""

PART_SECONDS = 5.0
"""After this time, a part ends with the current folder."""


@dataclass(frozen=True, slots=True)
class InventoryPart:
    """The objects of some folders of a member."""

    objects: Inventory
    last_folder: str | None
    """The next part begins after this folder; None if this part is the last one."""


def read_inventory_part(
    folders: Iterable[str], after: str, seconds: float, read_folder: Callable[[str], Inventory]
) -> InventoryPart:
    """Read the folders after `after`, in the order of their names, for about `seconds`, but at least one of them.

    read_folder: returns the objects of a folder.
    """
    until, objects = time.monotonic() + seconds, Inventory()
    remaining = sorted(folder for folder in folders if folder > after)
    for folder in remaining:
        objects |= read_folder(folder)
        if time.monotonic() >= until and folder != remaining[-1]:
            return InventoryPart(objects, folder)
    return InventoryPart(objects, None)


def read_all_parts(read: Callable[[str], InventoryPart]) -> Inventory:
    """Return the objects of all parts. read: returns the part after a folder."""
    objects, after = Inventory(), ""
    while True:
        part = read(after)
        objects |= part.objects
        if part.last_folder is None:
            return objects
        after = part.last_folder
