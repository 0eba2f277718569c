"""Check that a store refuses a put whose condition does not hold.

Otherwise a repository there is not protected from a fenced writer. Some servers of the S3 protocol ignore If-None-Match or
If-Match, and acknowledge the put.
"""

from __future__ import annotations

import logging
import os

from ckpt.storage.base.errors import Refused
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

UNFENCED_STORES_VARIABLE = "CKPT_UNFENCED_STORES"
"""The environment variable with URLs, separated by spaces, below which the user ensures that there is one writer at a time."""

_probed_urls: set[str] = set()
"""The stores that this process has probed. Used without a lock, as each call of a set is atomic."""


def require_conditional_puts(store: Store, name: str) -> None:
    """Raise Refused if `store` ignores the conditions of puts. Each URL is probed once in a process.

    name: an existing object that no other process writes; it keeps its bytes.
    """
    if store.url in _probed_urls:
        return
    if not store.honours_conditions(name):
        what = f"{store.url} ignores conditions of puts (If-None-Match, If-Match), so an old writer could delete newer steps"
        if not _is_allowed_unfenced(store.url):
            raise Refused(f"{what}; use another store, or for a single job set {UNFENCED_STORES_VARIABLE} to this URL")
        log.warning("%s; %s allows it", what, UNFENCED_STORES_VARIABLE)
    _probed_urls.add(store.url)


def _is_allowed_unfenced(url: str) -> bool:
    stated = [each.rstrip("/") for each in os.environ.get(UNFENCED_STORES_VARIABLE, "").split()]
    return any(url == each or url.startswith(f"{each}/") for each in stated)
