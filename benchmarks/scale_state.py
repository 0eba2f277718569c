"""The states of scale.py: the manifest rows of all ranks of a GPT under tensor, pipeline and data parallelism."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ckpt.format.digest import CELL_BYTES
from ckpt.format.limits import BLOCK_BYTES
from ckpt.format.manifest_parquet import COLUMNS, write_part
from ckpt.state.boxes import Box
from ckpt.support.arrow_columns import list_array_of_flat

METADATA = {"format": "1", "digest": "xxh3-128", "step": "1000"}
STATES = {"model": ("bfloat16", 2), "master": ("float32", 4), "exp_avg": ("float32", 4), "exp_avg_sq": ("float32", 4)}
STATE_BYTES = sum(itemsize for _, itemsize in STATES.values())

Ints = np.ndarray[Any, Any]


class Model(NamedTuple):
    """The size of a GPT."""

    title: str
    parameters: float
    layers: int
    hidden: int


class Mesh(NamedTuple):
    """The degrees of tensor, pipeline and data parallelism."""

    tensor: int
    pipeline: int
    data: int

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return math.prod(self)


SIZES = {
    100: (Model("GPT, 1.7 billion", 1.7e9, 24, 2304), Mesh(4, 5, 5)),
    1024: (Model("GPT, 18.4 billion", 18.4e9, 40, 6144), Mesh(8, 8, 16)),
    10080: (Model("GPT, 175 billion", 174.6e9, 96, 12288), Mesh(8, 20, 63)),
}


class Tensor(NamedTuple):
    """A parameter of a model."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    """The axis along which it is sharded over the tensor-parallel ranks; None if each has all of it."""
    stage: int
    """The stage of the pipeline."""


def tensors(model: Model, mesh: Mesh) -> Iterator[Tensor]:
    """Yield the parameters of a model."""
    h = model.hidden
    yield Tensor("embedding.word", (51200, h), 0, 0)
    yield Tensor("embedding.position", (2048, h), None, 0)
    for layer in range(model.layers):
        stage = layer * mesh.pipeline // model.layers
        for name, shape, axis in (
            ("attention_norm.weight", (h,), None), ("attention_norm.bias", (h,), None),
            ("attention.qkv.weight", (3 * h, h), 0), ("attention.qkv.bias", (3 * h,), 0),
            ("attention.out.weight", (h, h), 1), ("attention.out.bias", (h,), None),
            ("mlp_norm.weight", (h,), None), ("mlp_norm.bias", (h,), None),
            ("mlp.up.weight", (4 * h, h), 0), ("mlp.up.bias", (4 * h,), 0),
            ("mlp.down.weight", (h, 4 * h), 1), ("mlp.down.bias", (h,), None),
        ):  # fmt: skip
            yield Tensor(f"layers.{layer}.{name}", shape, axis, stage)
    yield Tensor("norm.weight", (h,), None, mesh.pipeline - 1)
    yield Tensor("norm.bias", (h,), None, mesh.pipeline - 1)


def slices(tensor: Tensor, mesh: Mesh) -> list[Box]:
    """Return the boxes of the tensor-parallel ranks."""
    if tensor.axis is None:
        return [Box((0,) * len(tensor.shape), tensor.shape)]
    n = tensor.shape[tensor.axis] // mesh.tensor
    shape = [*tensor.shape]
    shape[tensor.axis] = n
    corners = np.zeros((mesh.tensor, len(shape)), int)
    corners[:, tensor.axis] = np.arange(mesh.tensor) * n
    return [Box(tuple(corner), tuple(shape)) for corner in corners.tolist()]


def cuts(box: Box, itemsize: int, begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Split ranges of rows of a box into blocks. Return for each block its range, its first row, and its number of rows."""
    most = max(1, BLOCK_BYTES // (itemsize * math.prod(box.shape[1:])))
    pieces = -(-(end - begin) // most)
    which = np.repeat(np.arange(len(begin)), pieces)
    number = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    a, length, count = begin[which], (end - begin)[which], pieces[which]
    first = a + length * number // count
    return which, first, a + length * (number + 1) // count - first


def rows(model: Model, mesh: Mesh) -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, Ints]]:
    """Return the leaves, and for each row of the manifest its leaf, rank, box and bytes, sorted by rank."""
    leaves: list[tuple[str, str, tuple[int, ...]]] = []
    found: list[Ints] = []
    listed = list(tensors(model, mesh))
    for state, (dtype, itemsize) in STATES.items():
        for tensor in listed:
            leaves.append((f"{state}.{tensor.name}", dtype, tensor.shape))
            for t, box in enumerate(slices(tensor, mesh)):
                length = box.shape[0]
                if state == "model":  # equal on all data-parallel ranks, which share the blocks
                    _, first, count = cuts(box, itemsize, np.array([0]), np.array([length]))
                    data = (np.arange(len(first)) + len(leaves)) % mesh.data
                else:
                    edges = length * np.arange(mesh.data + 1) // mesh.data
                    data, first, count = cuts(box, itemsize, edges[:-1], edges[1:])
                writer = t if tensor.axis is not None else data % mesh.tensor
                new_rows = np.zeros((len(first), 7), np.int64)
                new_rows[:, 0] = len(leaves) - 1
                new_rows[:, 1] = (tensor.stage * mesh.data + data) * mesh.tensor + writer
                new_rows[:, 2] = box.offset[0] + first
                new_rows[:, 3] = count
                new_rows[:, 4:6] = (box.offset[1], box.shape[1]) if len(box.shape) > 1 else (0, 1)
                new_rows[:, 6] = count * itemsize * math.prod(box.shape[1:])
                found.append(new_rows)
    table = np.concatenate(found)
    table = table[np.argsort(table[:, 1], kind="stable")]
    names = ("leaf", "rank", "offset", "length", "offset1", "length1", "nbytes")
    return leaves, dict(zip(names, table.T, strict=True))


def parts(model: Model, mesh: Mesh) -> Iterator[tuple[int, bytes]]:
    """Yield each rank and its part as the content of a file."""
    leaves, columns = rows(model, mesh)
    edges = np.searchsorted(columns["rank"], np.arange(mesh.ranks + 1))
    for rank, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
        part = {name: column[a:b] for name, column in columns.items()}
        yield rank, write_part(rank_table(rank, leaves, part), METADATA)


def rank_table(rank: int, leaves: list[tuple[str, str, tuple[int, ...]]], part: dict[str, Ints]) -> pa.Table:
    """Return the manifest rows of one rank as a table."""
    row_leaves = [leaves[i] for i in part["leaf"].tolist()]
    axes = np.array([len(shape) for _, _, shape in row_leaves])
    has_axis = np.arange(2) < axes[:, None]

    def lists(*columns: Ints) -> pa.Array:
        return list_array_of_flat(np.stack(columns, 1)[has_axis], axes)

    whole = np.array([(*shape, 1)[:2] for _, _, shape in row_leaves])
    size = -(-part["nbytes"] // 4096) * 4096
    cells = [os.urandom(8 * -(-n // CELL_BYTES)) for n in part["nbytes"].tolist()]
    columns = {
        "leaf": [name for name, _, _ in row_leaves],
        "dtype": pa.array([dtype for _, dtype, _ in row_leaves]).dictionary_encode(),
        "global_shape": lists(*whole.T),
        "offset": lists(part["offset"], part["offset1"]),
        "shape": lists(part["length"], part["length1"]),
        "pack": pa.array([f"steps/1000/pack/{rank}-1-0-0.pack"] * len(row_leaves)).dictionary_encode(),
        "position": np.cumsum(size) - size,
        "stored": part["nbytes"],
        "raw": part["nbytes"],
        "start": np.zeros(len(row_leaves), np.int64),
        "nbytes": part["nbytes"],
        "codec": pa.nulls(len(row_leaves), pa.string()).dictionary_encode(),
        "digest": pa.array([os.urandom(16) for _ in row_leaves], pa.binary()),
        "checksum": pa.nulls(len(row_leaves), pa.uint64()),
        "cells": pa.array(cells, pa.binary()),
    }
    return pa.table({name: columns[name] for name in COLUMNS})


def boxes_of_one_rank(model: Model, mesh: Mesh) -> list[tuple[str, Box | None]]:
    """Return the boxes that a rank in the middle of a job loads, if it continues with 3/4 of the data-parallel ranks."""
    stage, t, data = mesh.pipeline // 2, mesh.tensor // 2, max(1, mesh.data * 3 // 4)
    boxes: list[tuple[str, Box | None]] = []
    for tensor in tensors(model, mesh):
        if tensor.stage == stage:
            shards = slices(tensor, mesh)
            box = shards[t % len(shards)]
            boxes.append((f"model.{tensor.name}", box))
            a, b = (box.shape[0] * d // data for d in (data // 2, data // 2 + 1))
            mine = Box((box.offset[0] + a, *box.offset[1:]), (b - a, *box.shape[1:]))
            boxes += [(f"{state}.{tensor.name}", mine) for state in STATES if state != "model"]
    return boxes
