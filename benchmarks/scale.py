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
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from scale_state import (
    METADATA,
    SIZES,
    STATE_BYTES,
    STATES,
    boxes_of_one_rank,
    parts,
    slices,
    tensors,
)

from ckpt.format import manifest
from ckpt.format.digest import CELL_BYTES, digest
from ckpt.format.limits import BLOCK_BYTES
from ckpt.format.manifest_parquet import read_part
from ckpt.saving.block_plan import LeafSpec, plan_blocks
from ckpt.saving.manifest_merge import merge_rows
from ckpt.state.boxes import Box, Replica

REPEAT = 5


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
    """Measure the block plan of a rank in the middle of the job: in the first save, and in later ones of the same structure."""
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
        "model", "ranks", "rows", "leaves", "manifest\nMB", "decode parts\ns", "merge\ns", "encode\ns", "peak\nMiB",
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
