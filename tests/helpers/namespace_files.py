"""Files of a namespace, old and new, for tests of faults."""

from __future__ import annotations

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.testing import random_bytes

OLD, NEW = random_bytes(70_000, 1), random_bytes(9_000_000, 2)


def fragment_counts(namespace: Namespace, path: str) -> set[int]:
    """Return the numbers of fragments that stripes of a file have."""
    file = namespace.stat(path)
    assert file is not None
    assert file.layout is not None
    return {sum(f is not None for f in stripe.fragments) for stripe in file.layout.stripes}
