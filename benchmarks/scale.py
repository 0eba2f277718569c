"""Measures how the manifest grows with the ranks: the merge of their parts, and a look-up for one rank.

The models are GPTs with the shapes of Narayanan et al. 2021 (arXiv:2104.04473, table 1) under tensor, pipeline and data
parallelism, with the optimizer sharded over the data-parallel ranks. The model grows with the ranks, so each rank stores about
100 rows.

    python benchmarks/scale.py             all sizes, the table, docs/design/scale.png
    python benchmarks/scale.py --ranks 100     one size
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ckpt.format import manifest
from ckpt.format.digest import CELL_BYTES, digest
from ckpt.format.limits import BLOCK_BYTES
from ckpt.format.manifest_parquet import COLUMNS, read_part, write_part
from ckpt.saving.manifest_merge import merge_rows
from ckpt.saving.write_plan import LeafSpec, plan_blocks
from ckpt.state.boxes import Box, Replica
from ckpt.support.arrow_columns import list_array_of_flat

METADATA = {"format": "1", "digest": "xxh3-128", "step": "1000"}
STATES = {"model": ("bfloat16", 2), "master": ("float32", 4), "exp_avg": ("float32", 4), "exp_avg_sq": ("float32", 4)}
STATE_BYTES = sum(itemsize for _, itemsize in STATES.values())
REPEAT = 5

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


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one size, in seconds and bytes."""

    title: str
    ranks: int
    rows: int
    leaves: int
    nbytes: int
    read: float
    merge: float
    encode: float
    merge_peak: int
    open: float
    find: float
    found: int
    find_peak: int
    plan_first: float
    plan_again: float


# --- the rows of all ranks -------------------------------------------------------------------------------------


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


# --- one size, each task in a process of its own ---------------------------------------------------------------


def make(size: int, folder: Path) -> dict[str, Any]:
    """Write the parts of all ranks to a file."""
    with open(folder / "parts", "wb") as file:
        pickle.dump(list(parts(*SIZES[size])), file)
    return {}


def committer(size: int, folder: Path) -> dict[str, Any]:
    """Measure the work of rank 0: reading and merging the parts, and encoding the manifest."""
    with open(folder / "parts", "rb") as file:
        files = pickle.load(file)
    began = time.perf_counter()
    tables = [(rank, read_part(data, f"the part of rank {rank}")) for rank, data in files]
    read = time.perf_counter() - began
    merged: list[float] = []
    encoded: list[float] = []
    for _ in range(REPEAT if size < 5000 else 2):
        began = time.perf_counter()
        table = merge_rows(tables)
        merged.append(time.perf_counter() - began)
        began = time.perf_counter()
        data = manifest.write_table(table, METADATA)
        encoded.append(time.perf_counter() - began)
    (folder / "manifest").write_bytes(data)
    return {
        "rows": len(table), "nbytes": len(data), "read": read, "merge": min(merged), "encode": min(encoded),
        "merge_peak": peak(),
    }  # fmt: skip


def loader(size: int, folder: Path) -> dict[str, Any]:
    """Measure the work of each rank that loads: opening the manifest and finding boxes. The file is in the page cache."""
    boxes = boxes_of_one_rank(*SIZES[size])
    opened: list[float] = []
    found: list[float] = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        data = (folder / "manifest").read_bytes()
        digest("xxh3-128", data)
        table = manifest.decode(data, "the manifest")
        leaves = table.leaves()
        opened.append(time.perf_counter() - began)
        began = time.perf_counter()
        rows_found = table.find(boxes)
        found.append(time.perf_counter() - began)
    for (name, box), mine in zip(boxes, rows_found, strict=True):
        assert mine, f"no row has {name} {box}"
    return {
        "leaves": len(leaves), "open": sorted(opened)[REPEAT // 2], "find": sorted(found)[REPEAT // 2],
        "found": sum(map(len, rows_found)), "find_peak": peak(),
    }  # fmt: skip


def planner(size: int, folder: Path) -> dict[str, Any]:
    """Measure the write plan of a rank in the middle of the job: in the first save, and in later ones of the same structure."""
    model, mesh = SIZES[size]
    stage, t, data = mesh.pipeline // 2, mesh.tensor // 2, mesh.data // 2
    first = stage * mesh.data * mesh.tensor + t
    copies = Replica(data, mesh.data, tuple(range(first, first + mesh.data * mesh.tensor, mesh.tensor)))
    specs = []
    for tensor in tensors(model, mesh):
        if tensor.stage == stage:
            shards = slices(tensor, mesh)
            box = shards[t % len(shards)]
            for state, (dtype, itemsize) in STATES.items():
                a, b = (box.shape[0] * d // mesh.data for d in (data, data + 1)) if state != "model" else (0, box.shape[0])
                mine = Box((box.offset[0] + a, *box.offset[1:]), (b - a, *box.shape[1:]))
                specs.append(LeafSpec(
                    f"{state}.{tensor.name}", dtype, mine.shape, itemsize, mine.size * itemsize, "none", tensor.shape,
                    mine.offset, copies if state == "model" else None,
                ))  # fmt: skip
    seconds = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        plan_blocks(specs).columns.arrow_columns()
        seconds.append(time.perf_counter() - began)
    return {"plan_first": seconds[0], "plan_again": max(seconds[1:])}


TASKS = {"planner": planner, "make": make, "committer": committer, "loader": loader}


def peak() -> int:
    """Return the peak memory of this process in bytes; that of getrusage(2) begins with the memory of the parent process."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def measure(size: int) -> Figures:
    """Run all tasks of one size, each in a new process."""
    model, mesh = SIZES[size]
    figures: dict[str, Any] = {"title": model.title, "ranks": mesh.ranks}
    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS:
            command = [sys.executable, __file__, "--task", task, "--ranks", str(size), "--folder", folder]
            figures |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Figures(**figures)


# --- output ----------------------------------------------------------------------------------------------------


def show(results: list[Figures]) -> None:
    """Print the table."""
    table = Table(box=SIMPLE_HEAD, title="The manifest of one step", title_justify="left")
    for column in (
        "model", "ranks", "rows", "leaves", "manifest\nMB", "read parts\ns", "merge\ns", "encode\ns", "peak\nMiB",
        "open\ns", "find\ns", "rows\nfound", "peak\nMiB", "plan\nms", "again\nms",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for f in results:
        table.add_row(
            f.title, f"{f.ranks:,}", f"{f.rows:,}", f"{f.leaves:,}", f"{f.nbytes / 1e6:,.1f}", f"{f.read:.2f}",
            f"{f.merge:.2f}", f"{f.encode:.2f}", f"{f.merge_peak >> 20:,}", f"{f.open:.3f}", f"{f.find:.3f}",
            f"{f.found:,}", f"{f.find_peak >> 20:,}", f"{f.plan_first * 1e3:.1f}", f"{f.plan_again * 1e3:.2f}",
        )  # fmt: skip
    Console(width=160).print(table)


def on_paper(largest: Figures) -> None:
    """Print an estimate for a mixture of experts of 14.5 trillion parameters on 96,000 ranks, from the largest size."""
    ranks, state = 96_000, 14.5e12 * STATE_BYTES
    blocks = state / BLOCK_BYTES
    count = blocks + 50 * ranks  # the full blocks, and for each rank about 50 boxes that end in a block that is not full
    cells = 8 * STATE_BYTES * SIZES[largest.ranks][0].parameters / CELL_BYTES
    other = (largest.nbytes - cells) / largest.rows
    nbytes = count * other + 8 * state / CELL_BYTES
    factor = max(count / largest.rows, nbytes / largest.nbytes)
    print(
        f"\nOn paper, 14.5 trillion parameters over {ranks:,} ranks, {state / 1e12:,.0f} TB: {count / 1e6:.0f} million rows "
        f"({count / ranks:.0f} a rank), a manifest of {nbytes / 1e9:.1f} GB; {factor:.0f} times the largest size: parts read "
        f"in {largest.read * count / largest.rows:.0f} s, merged in {largest.merge * factor:.0f} s, encoded in "
        f"{largest.encode * factor:.0f} s, opened in {largest.open * factor:.1f} s. A change is needed before: the 32-bit "
        f"offsets of Arrow allow 2 GiB of cells in a column, which is {2**31 / 8 * CELL_BYTES / 1e12:.0f} TB of state."
    )


def draw(results: list[Figures], file: Path) -> None:
    """Draw the results into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    text, grey = "#343a40", "#868e96"
    fig, ax = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    count = [f.rows for f in results]
    curves = [
        ("merge and encode", [f.merge + f.encode for f in results], "#0b7285", "o", 8),
        ("open, and find the boxes of one rank", [f.open + f.find for f in results], "#c92a2a", "s", -16),
    ]
    for label, seconds, colour, marker, points_above in curves:
        ax.loglog(count, seconds, marker=marker, color=colour, label=label)
        for x, y in zip(count, seconds, strict=True):
            ax.annotate(
                f"{y:.2g} s", (x, y), (0, points_above), textcoords="offset points", ha="center", fontsize=9, color=colour
            )
    low = curves[0][1][0]
    ax.loglog(count, [low * n / count[0] for n in count], linestyle=(0, (4, 3)), color="#c4c9cf", label="linear")
    ax.set_xticks(count, [f"{f.rows:,} rows\n{f.ranks:,} ranks\n{f.title} parameters" for f in results])
    ax.minorticks_off()
    ax.margins(x=0.12, y=0.15)
    ax.set_ylabel("seconds", color=text)
    ax.set_title("The manifest of one step", loc="left", color=text, fontsize=12, weight="bold")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=9, colors=grey)
    ax.legend(frameon=False, fontsize=9, loc="upper left")
    fig.savefig(file, dpi=150)
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=SIZES, action="append")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "design" / "scale.png")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps(TASKS[args.task](args.ranks[0], args.folder)))
        return
    results = [measure(size) for size in args.ranks or SIZES]
    show(results)
    on_paper(results[-1])
    print(json.dumps([asdict(f) for f in results]), file=sys.stderr)
    if not args.ranks:
        draw(results, args.out)


if __name__ == "__main__":
    main()
