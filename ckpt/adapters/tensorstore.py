"""Reads arrays of a step through TensorStore. Opening one reads no data, and a read takes only the blocks that it needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorstore as ts

from ckpt.repository.checkpoint import Checkpoint


def open_array(checkpoint: Checkpoint, name: str) -> Any:
    """Return an array of a step as a `tensorstore.TensorStore` that can only be read.

        weight = open_array(ckpt.open("/data/run").latest(), "model.embed.weight")
        rows = weight[100:200].read().result()

    checkpoint: a step of `ckpt.open(url)`.
    name: the name of a leaf.

    Raises:
        LeafNotFound: The step has no such array.

    A read raises IntegrityError for damaged bytes, and StoreError if the store failed.
    """
    lazy = checkpoint[name]

    def read(domain: Any, array: np.ndarray[Any, Any], parameters: object) -> None:
        array[...] = lazy[tuple(slice(low, high) for low, high in zip(domain.inclusive_min, domain.exclusive_max, strict=True))]

    return ts.virtual_chunked(read, dtype=ts.dtype(lazy.dtype), shape=lazy.shape, rank=len(lazy.shape))
