"""The call by which a client lists the objects of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckpt.storage.base.errors import InvalidArgument, Unavailable
from ckpt.storage.member.inventory import PART_SECONDS, InventoryPart


def inventory_part(call_parts: Callable[..., Sequence[Any]], url: str, after: str, most_seconds: float) -> InventoryPart:
    """Return the objects of the folders after `after` that the node can list in a few seconds, and at most `most_seconds`.

    call_parts: `NodeStore.call_parts` of the client of the node at `url`. An older node lists all objects in one call.

    Raises Unavailable if the answer is empty, and as `call_parts` does.
    """
    try:
        answers = call_parts("inventory.part", after, min(PART_SECONDS, most_seconds))
    except InvalidArgument as error:
        if "has no call" not in str(error):
            raise
        answers = [*call_parts("inventory"), None]
    if not answers:
        raise Unavailable(f"{url} does not answer inventory.part by this protocol; check that it is a node")
    *messages, last_folder = answers
    return InventoryPart({name: (nbytes, age) for entries in messages for name, nbytes, age in entries}, last_folder)
