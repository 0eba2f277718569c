"""Names of versions and objects, drawn at random by whoever writes."""

from __future__ import annotations

import secrets
import time


def new_version() -> str:
    """Return a name for new content.

    It begins with the time, which tells an old object without a record from one that is still being written.
    """
    return f"{int(time.time()):010x}{secrets.token_hex(11)}"


def object_name(version: str) -> str:
    """Of the object that holds a member's fragments of a file; spread over folders."""
    return f"{version[-2:]}/{version}-{secrets.token_hex(2)}"
