"""Whether a store refuses a put whose condition does not hold; without that a repository there has no protection from a writer
that was succeeded. Some servers of the S3 protocol ignore If-None-Match or If-Match, and acknowledge the put."""

from __future__ import annotations

import logging
import os

from ckpt.storage.base.errors import Refused
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

UNFENCED_STORES_VARIABLE = "CKPT_UNFENCED_STORES"
"""URLs, separated by spaces, below which the user takes care that one writer at a time is there."""

_probed_urls: set[str] = set()


def require_conditional_puts(store: Store, name: str) -> None:
    """Raise Refused where `store` ignores the conditions of puts. Asked once for a URL in a process.

    name: an object that is there and that nobody else writes; it keeps its bytes.
    """
    if store.url in _probed_urls:
        return
    if not store.honours_conditions(name):
        what = (
            f"{store.url} takes puts whose condition (If-None-Match, If-Match) does not hold: a writer that another job has "
            "succeeded could replace and delete what that job saves"
        )
        if not _is_allowed_unfenced(store.url):
            raise Refused(
                f"{what}. Use a store with conditional puts (docs/reference/stores.md says which have them); where it is "
                f"certain that one job at a time writes there, set {UNFENCED_STORES_VARIABLE}={store.url}"
            )
        log.warning("%s; %s allows it", what, UNFENCED_STORES_VARIABLE)
    _probed_urls.add(store.url)


def _is_allowed_unfenced(url: str) -> bool:
    stated = [each.rstrip("/") for each in os.environ.get(UNFENCED_STORES_VARIABLE, "").split()]
    return any(url == each or url.startswith(f"{each}/") for each in stated)
