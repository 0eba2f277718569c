"""The check that a namespace has nothing to repair."""

from __future__ import annotations

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import scrub
from helpers.processes import until


def require_whole(namespace: Namespace, verify: bool = False) -> None:
    """Fail unless a scrub finds nothing to repair. A write returns when a quorum has the record; other members get it later."""
    until(lambda: scrub.scrub_namespace(namespace, verify=verify).is_whole, "a scrub that finds nothing to repair")
