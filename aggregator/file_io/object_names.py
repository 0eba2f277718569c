"""Names of versions and objects, drawn at random by whoever writes."""

from __future__ import annotations

import secrets
import time


def new_version() -> str:
    """Of a content; begins with the time, so that what nobody refers to can be told from what is being written."""
    return f"{int(time.time()):010x}{secrets.token_hex(11)}"


def object_name(version: str) -> str:
    """Of the object that holds a member's fragments of a file; spread over folders."""
    return f"{version[-2:]}/{version}-{secrets.token_hex(2)}"
