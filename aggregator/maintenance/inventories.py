"""The lists of the objects of all members, each read in parts."""

from __future__ import annotations

from functools import partial

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.base.errors import StoreError
from ckpt.storage.member.inventory import Inventory


def read_inventories(namespace: Namespace) -> tuple[dict[str, Inventory], dict[str, StoreError]]:
    """Return the objects of each member that answers every call, and the error of each other member.

    A call takes a few seconds. So a member with millions of objects is not mistaken for a silent one.
    """
    found: dict[str, Inventory] = {name: {} for name in namespace.open_members}
    missing: dict[str, StoreError] = {}
    after = dict.fromkeys(found, "")
    while after:
        calls = {name: partial(namespace.open_members[name].inventory_part, folder) for name, folder in after.items()}
        parts, errors = namespace.fan_out.ask(calls, namespace.commit_timeout_seconds)
        missing |= errors
        for name, part in parts.items():
            found[name] |= part.objects
        after = {name: part.last_folder for name, part in parts.items() if part.last_folder is not None}
    return {name: objects for name, objects in found.items() if name not in missing}, missing
