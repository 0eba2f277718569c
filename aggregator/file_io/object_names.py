"""The random names of versions and objects."""

from __future__ import annotations

import secrets
import time


def new_version() -> str:
    """Return a name for new content.

    It begins with the time of its creation, so that the name of an object without a record shows how old the object is.
    """
    return f"{int(time.time()):010x}{secrets.token_hex(11)}"


def object_name(version: str) -> str:
    """Return a name for an object with the fragments of one version of a file; the names are spread over folders."""
    return f"{version[-2:]}/{version}-{secrets.token_hex(2)}"
