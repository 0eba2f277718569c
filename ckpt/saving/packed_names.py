"""Lists of names or other JSON values as a compressed text, in which ranks with equal leaves publish equal texts."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from ckpt.format.bounded_decode import inflate

_MAX_TEXT_BYTES = 256 << 20
"""The most bytes of a decoded text of one rank."""

_ITEMS_PER_CALL = 500
"""Items that are encoded in one call, which keeps the GIL from training steps for about a millisecond."""


def pack_names(items: Sequence[object]) -> str:
    """Return names, or other JSON values, as a text."""
    some = (items[i : i + _ITEMS_PER_CALL] for i in range(0, len(items), _ITEMS_PER_CALL))
    text = ",".join(json.dumps(part)[1:-1] for part in some)
    return base64.b64encode(zlib.compress(f"[{text}]".encode(), 1)).decode()


def unpack_names(text: str) -> list[Any]:
    """Return the items of a text that `pack_names` made."""
    found: list[Any] = json.loads(inflate(base64.b64decode(text), _MAX_TEXT_BYTES)) if text else []
    return found
