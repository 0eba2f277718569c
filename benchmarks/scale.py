"""How the manifest grows with the ranks: merging their parts, and opening it to find the boxes of one of them.

GPTs with the shapes of Narayanan et al. 2021 (arXiv:2104.04473, table 1) under tensor, pipeline and data parallelism, the
optimizer sharded over the data-parallel ranks: the model grows with the ranks, so that each stores about 100 rows.

    python benchmarks/scale.py             all sizes, the table, docs/design/scale.png
    python benchmarks/scale.py --ranks 100     one size
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import resource
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
    title: str
    parameters: float
    layers: int
    hidden: int


class Mesh(NamedTuple):
    tensor: int
    pipeline: int
    data: int

    @property
    def ranks(self) -> int:
        return math.prod(self)


SIZES = {
    100: (Model("GPT, 1.7 billion", 1.7e9, 24, 2304), Mesh(4, 5, 5)),
    1024: (Model("GPT, 18.4 billion", 18.4e9, 40, 6144), Mesh(8, 8, 16)),
    10080: (Model("GPT, 175 billion", 174.6e9, 96, 12288), Mesh(8, 20, 63)),
}


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    axis: int | None
    """Along which the tensor-parallel ranks cut it; None: each has all of it."""
    stage: int
    """Of the pipeline."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one size took: seconds, bytes."""

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


# --- the layout ------------------------------------------------------------------------------------------------


def tensors(model: Model, mesh: Mesh) -> Iterator[Tensor]:
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
    """The boxes of the tensor-parallel ranks."""
    if tensor.axis is None:
        return [Box((0,) * len(tensor.shape), tensor.shape)]
    n = tensor.shape[tensor.axis] // mesh.tensor
    shape = [*tensor.shape]
    shape[tensor.axis] = n
    corners = np.zeros((mesh.tensor, len(shape)), int)
    corners[:, tensor.axis] = np.arange(mesh.tensor) * n
    return [Box(tuple(corner), tuple(shape)) for corner in corners.tolist()]


def cuts(box: Box, itemsize: int, begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Ranges of rows of a box in blocks: the range that each is of, its first row, its rows."""
    most = max(1, BLOCK_BYTES // (itemsize * math.prod(box.shape[1:])))
    pieces = -(-(end - begin) // most)
    which = np.repeat(np.arange(len(begin)), pieces)
    number = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    a, length, count = begin[which], (end - begin)[which], pieces[which]
    first = a + length * number // count
    return which, first, a + length * (number + 1) // count - first


def rows(model: Model, mesh: Mesh) -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, Ints]]:
    """The leaves, and for each row the leaf, the rank, the box and its bytes, by rank."""
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
                made = np.zeros((len(first), 7), np.int64)
                made[:, 0] = len(leaves) - 1
                made[:, 1] = (tensor.stage * mesh.data + data) * mesh.tensor + writer
                made[:, 2] = box.offset[0] + first
                made[:, 3] = count
                made[:, 4:6] = (box.offset[1], box.shape[1]) if len(box.shape) > 1 else (0, 1)
                made[:, 6] = count * itemsize * math.prod(box.shape[1:])
                found.append(made)
    table = np.concatenate(found)
    table = table[np.argsort(table[:, 1], kind="stable")]
    names = ("leaf", "rank", "offset", "length", "offset1", "length1", "nbytes")
    return leaves, dict(zip(names, table.T, strict=True))


def parts(model: Model, mesh: Mesh) -> Iterator[tuple[int, bytes]]:
    """What each rank hands in, as its file."""
    leaves, columns = rows(model, mesh)
    edges = np.searchsorted(columns["rank"], np.arange(mesh.ranks + 1))
    for rank, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
        part = {name: column[a:b] for name, column in columns.items()}
        yield rank, write_part(rank_table(rank, leaves, part), METADATA)


def rank_table(rank: int, leaves: list[tuple[str, str, tuple[int, ...]]], part: dict[str, Ints]) -> pa.Table:
    of = [leaves[i] for i in part["leaf"].tolist()]
    axes = np.array([len(shape) for _, _, shape in of])
    held = np.arange(2) < axes[:, None]

    def lists(*columns: Ints) -> pa.Array:
        return list_array_of_flat(np.stack(columns, 1)[held], axes)

    whole = np.array([(*shape, 1)[:2] for _, _, shape in of])
    size = -(-part["nbytes"] // 4096) * 4096
    cells = [os.urandom(8 * -(-n // CELL_BYTES)) for n in part["nbytes"].tolist()]
    columns = {
        "leaf": [name for name, _, _ in of],
        "dtype": pa.array([dtype for _, dtype, _ in of]).dictionary_encode(),
        "global_shape": lists(*whole.T),
        "offset": lists(part["offset"], part["offset1"]),
        "shape": lists(part["length"], part["length1"]),
        "pack": pa.array([f"steps/1000/pack/{rank}-1-0-0.pack"] * len(of)).dictionary_encode(),
        "position": np.cumsum(size) - size,
        "stored": part["nbytes"],
        "raw": part["nbytes"],
        "start": np.zeros(len(of), np.int64),
        "nbytes": part["nbytes"],
        "codec": pa.nulls(len(of), pa.string()).dictionary_encode(),
        "digest": pa.array([os.urandom(16) for _ in of], pa.binary()),
        "checksum": pa.nulls(len(of), pa.uint64()),
        "cells": pa.array(cells, pa.binary()),
    }
    return pa.table({name: columns[name] for name in COLUMNS})


def wanted_by_one(model: Model, mesh: Mesh) -> list[tuple[str, Box | None]]:
    """The boxes of a rank in the middle of a job that goes on with three quarters of the data-parallel ranks."""
    stage, t, data = mesh.pipeline // 2, mesh.tensor // 2, max(1, mesh.data * 3 // 4)
    wanted: list[tuple[str, Box | None]] = []
    for tensor in tensors(model, mesh):
        if tensor.stage == stage:
            held = slices(tensor, mesh)
            box = held[t % len(held)]
            wanted.append((f"model.{tensor.name}", box))
            a, b = (box.shape[0] * d // data for d in (data // 2, data // 2 + 1))
            mine = Box((box.offset[0] + a, *box.offset[1:]), (b - a, *box.shape[1:]))
            wanted += [(f"{state}.{tensor.name}", mine) for state in STATES if state != "model"]
    return wanted


# --- one size, each task in a process of its own ---------------------------------------------------------------


def make(size: int, folder: Path) -> dict[str, Any]:
    with open(folder / "parts", "wb") as file:
        pickle.dump(list(parts(*SIZES[size])), file)
    return {}


def committer(size: int, folder: Path) -> dict[str, Any]:
    """What rank 0 does with the parts."""
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
    """What each rank does with the manifest: from the page cache, as it comes after the first rank of a host."""
    wanted = wanted_by_one(*SIZES[size])
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
        rows_found = table.find(wanted)
        found.append(time.perf_counter() - began)
    for (name, box), mine in zip(wanted, rows_found, strict=True):
        assert mine, f"{name} {box} is nowhere"
    return {
        "leaves": len(leaves), "open": sorted(opened)[REPEAT // 2], "find": sorted(found)[REPEAT // 2],
        "found": sum(map(len, rows_found)), "find_peak": peak(),
    }  # fmt: skip


def planner(size: int, folder: Path) -> dict[str, Any]:
    """What a rank in the middle computes before each save: the first time, and when the structure is known."""
    model, mesh = SIZES[size]
    stage, t, data = mesh.pipeline // 2, mesh.tensor // 2, mesh.data // 2
    first = stage * mesh.data * mesh.tensor + t
    copies = Replica(data, mesh.data, tuple(range(first, first + mesh.data * mesh.tensor, mesh.tensor)))
    specs = []
    for tensor in tensors(model, mesh):
        if tensor.stage == stage:
            held = slices(tensor, mesh)
            box = held[t % len(held)]
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(size: int) -> Figures:
    model, mesh = SIZES[size]
    figures: dict[str, Any] = {"title": model.title, "ranks": mesh.ranks}
    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS:
            command = [sys.executable, __file__, "--task", task, "--ranks", str(size), "--folder", folder]
            figures |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Figures(**figures)


# --- what is shown ---------------------------------------------------------------------------------------------


def show(results: list[Figures]) -> None:
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
    """A mixture of experts of 14.5 trillion parameters over 96,000 ranks, by what the largest size took."""
    ranks, state = 96_000, 14.5e12 * STATE_BYTES
    blocks = state / BLOCK_BYTES
    count = blocks + 50 * ranks  # blocks that are full, and about 50 boxes a rank that end in one that is not
    cells = 8 * STATE_BYTES * SIZES[largest.ranks][0].parameters / CELL_BYTES
    other = (largest.nbytes - cells) / largest.rows
    nbytes = count * other + 8 * state / CELL_BYTES
    factor = max(count / largest.rows, nbytes / largest.nbytes)
    print(
        f"\nOn paper, 14.5 trillion parameters over {ranks:,} ranks, {state / 1e12:,.0f} TB: {count / 1e6:.0f} million rows "
        f"({count / ranks:.0f} a rank), a manifest of {nbytes / 1e9:.1f} GB; {factor:.0f} times the largest size: parts read "
        f"in {largest.read * count / largest.rows:.0f} s, merged in {largest.merge * factor:.0f} s, encoded in "
        f"{largest.encode * factor:.0f} s, opened in {largest.open * factor:.1f} s. Not as it is: Arrow's 32-bit offsets hold "
        f"2 GiB of cells in one column, which is {2**31 / 8 * CELL_BYTES / 1e12:.0f} TB of state."
    )


def draw(results: list[Figures], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    text, grey = "#343a40", "#868e96"
    fig, ax = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    count = [f.rows for f in results]
    curves = [
        ("merge and encode", [f.merge + f.encode for f in results], "#0b7285", "o"),
        ("open, and find the boxes of one rank", [f.open + f.find for f in results], "#c92a2a", "s"),
    ]
    for label, seconds, colour, marker in curves:
        ax.loglog(count, seconds, marker=marker, color=colour, label=label)
        for x, y in zip(count, seconds, strict=True):
            ax.annotate(f"{y:.2g} s", (x, y), (0, 8), textcoords="offset points", ha="center", fontsize=9, color=colour)
    low = curves[0][1][0]
    ax.loglog(count, [low * n / count[0] for n in count], linestyle=(0, (4, 3)), color="#c4c9cf", label="linear")
    ax.set_xticks(count, [f"{f.rows:,} rows\n{f.ranks:,} ranks\n{f.title}" for f in results])
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
