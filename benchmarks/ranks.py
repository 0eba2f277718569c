"""Compares saves of a sharded state by four processes, and loads by other numbers, with torch DCP, in one run.

    python benchmarks/ranks.py                 2 GiB over 4 ranks: table, benchmarks/out/ranks.json, docs/design/ranks.png
    python benchmarks/ranks.py --draw FILE     the table and the plot of an earlier run

Every leaf is a DTensor that is sharded by rows. In "replicated" states, every rank has all of it, as in data parallelism. The
processes import their modules before the clock starts. It stops when the slowest rank is done and every file is durable. The
first save of a process also allocates its buffers, so it is reported separately. Loads are cold and in other processes, and the
loaded values are compared with the saved ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rank_tasks import READER, Result, gpt, run_rank
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
PEERS = {"ckpt": "ckpt", "dcp": "torch DCP"}
MORE = (3, 2, 1)
"""Further numbers of ranks that load what four ranks saved."""

# --- the limits: the same number of processes that only write --------------------------------------


def raw_writes(folder: Path, nbytes: int, processes: int) -> float:
    """Return the seconds in which processes write equal shares by O_DIRECT with four threads each, and make them durable."""
    command = [sys.executable, __file__, "--raw", str(nbytes // processes), "--data"]
    children = [
        subprocess.Popen([*command, str(folder / f"raw-{i}")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for i in range(processes)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    os.sync()
    began = time.perf_counter()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        if child.wait():
            raise RuntimeError("a raw writer failed")
    taken = time.perf_counter() - began
    for i in range(processes):
        (folder / f"raw-{i}").unlink()
    return taken


def raw_writer(file: Path, nbytes: int) -> None:
    """Run as one process of `raw_writes`: wait for a line on stdin, and then write."""
    import mmap

    from limits import in_threads

    block, threads = 8 << 20, 4
    buffer = mmap.mmap(-1, block)
    buffer.write(np.random.default_rng(0).bytes(block))
    print("ready", flush=True)
    sys.stdin.readline()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, nbytes)

    def write(first: int) -> None:
        for offset in range(first * block, nbytes // block * block, threads * block):
            os.pwrite(descriptor, buffer, offset)

    in_threads(threads, write)
    os.fdatasync(descriptor)
    os.close(descriptor)


# --- a run -----------------------------------------------------------------------------------------------------


def launch(args: argparse.Namespace, ranks: int, task: str, peer: str, kind: str, data: Path) -> Result:
    """Run a task on a number of ranks, and return the result of rank 0."""
    result = data.parent / "result.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
        "--task", task, "--peer", peer, "--kind", kind, "--gib", str(args.gib), "--repeat", str(args.repeat),
        "--data", str(data), "--result", str(result),
    ]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{peer} {kind} {task}: {done.stderr[-2000:]}")
    found: Result = json.loads(result.read_text())
    return found


def run(args: argparse.Namespace, folder: Path) -> Result:
    """Measure everything, and return the results."""
    import limits
    import states
    from probes import drop_cache

    unique = states.nbytes(gpt(args.gib))
    results: Result = {"unique": unique, "ranks": args.ranks, "rows": []}
    limit: dict[str, list[float]] = {}

    def record(name: str, moved: int, task: Any, before: Any = lambda: None) -> None:
        limit.setdefault(name, []).extend(moved / 1e9 / limits.seconds(task, before) for _ in range(args.repeat))

    def measure_limits() -> None:
        source = np.frombuffer(np.random.default_rng(0).bytes(limits.UNIT) * max(1, unique // limits.UNIT), np.uint8)
        limits.write_limits(record, source, folder / "limit.bin")
        limits.read_limits(record, source.nbytes, folder / "limit.bin")
        (folder / "limit.bin").unlink()
        name = f"disk write O_DIRECT, {args.ranks} processes"
        limit.setdefault(name, []).extend(unique / 1e9 / raw_writes(folder, unique, args.ranks) for _ in range(args.repeat))

    def keep() -> None:
        (args.out / "ranks.json").write_text(json.dumps(results | {"limits": limit}, indent=1) + "\n")

    measure_limits()
    for kind in ("sharded", "replicated"):
        rows: dict[str, Result] = {}
        for peer in PEERS:
            data = folder / f"{peer}-{kind}"
            data.mkdir()
            rows[peer] = {"peer": peer, "kind": kind, **launch(args, args.ranks, "save", peer, kind, data)}
            print(f"{peer}: {kind} state saved", file=sys.stderr)
        rows["ckpt"] |= launch(args, args.ranks, "stall", "ckpt", kind, folder / f"ckpt-{kind}")
        results["rows"] += rows.values()
        keep()
        for ranks in loads_of(results, kind):
            for _ in range(args.repeat):  # alternating, because the speed of the disk varies from minute to minute
                for peer in (*PEERS, READER):
                    data = folder / f"{'ckpt' if peer == READER else peer}-{kind}"
                    drop_cache(data)
                    seconds = launch(args, ranks, "load", peer, kind, data)["load"]
                    if peer == READER:
                        limit.setdefault(read_limit(ranks, kind), []).append(unique / 1e9 / seconds)
                    else:
                        rows[peer].setdefault(f"load {ranks}", []).append(seconds)
            keep()
            print(f"{kind} state loaded into {ranks}", file=sys.stderr)
        for peer in PEERS:
            shutil.rmtree(folder / f"{peer}-{kind}")
        if kind == "sharded":
            measure_limits()
    results["limits"] = limit
    return results


def read_limit(ranks: int, kind: str) -> str:
    """Return the name of the limit for reads by this number of processes."""
    return f"disk read O_DIRECT and copied, {ranks} processes, {kind}"


def loads_of(results: Result, kind: str) -> tuple[int, ...]:
    """Return the numbers of ranks that load a state."""
    return (results["ranks"], *MORE) if kind == "sharded" else (results["ranks"],)


def show(results: Result) -> None:
    """Print the limits and the table."""
    unique, ranks = results["unique"] / 1e9, results["ranks"]
    console = Console(width=130)
    for name, samples in results["limits"].items():
        console.print(f"{name:52} {median(samples):6.2f} GB/s  ({min(samples):.2f} - {max(samples):.2f})")
    table = Table(box=SIMPLE_HEAD, title=f"{unique:.2f} GB, GB/s of unique bytes", title_justify="left")
    loads = [f"load {n}" for n in (ranks, *MORE)]
    for column in ("", "first save", "later saves", "stored", "stall / copy ms", *loads):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for row in results["rows"]:
        stall = f"{median(row['stall']) * 1e3:.0f} / {median(row['copy']) * 1e3:.0f}" if "stall" in row else ""
        table.add_row(
            f"{PEERS[row['peer']]}, {row['kind']}", f"{unique / row['first']:.2f}", f"{unique / median(row['again']):.2f}",
            f"{row['stored'] / results['unique']:.2f}", stall,
            *(f"{unique / median(row[load]):.2f}" if load in row else "" for load in loads),
        )  # fmt: skip
    console.print(table)


def draw(results: Result, file: Path) -> None:
    """Draw the results into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    unique, ranks = results["unique"] / 1e9, results["ranks"]
    colours = {"ckpt": "#0b7285", "dcp": "#c4c9cf"}
    fig, axes = plt.subplots(2, 1, figsize=(9, 7), layout="constrained", sharey=True)
    write = median(results["limits"][f"disk write O_DIRECT, {ranks} processes"])
    for ax, kind in zip(axes, ("sharded", "replicated"), strict=True):
        figures = ["first", "again", *(f"load {n}" for n in loads_of(results, kind))]
        titles = ["first save", "later saves", *(f"load into {n}" for n in loads_of(results, kind))]
        for i, peer in enumerate(PEERS):
            row = next(r for r in results["rows"] if (r["peer"], r["kind"]) == (peer, kind))
            rates = [unique / (row[f] if isinstance(row[f], float) else median(row[f])) for f in figures]
            bars = ax.bar(np.arange(len(figures)) + 0.4 * i - 0.2, rates, 0.38, color=colours[peer], label=PEERS[peer])
            ax.bar_label(bars, [f"{r:.2f}" for r in rates], label_type="center", fontsize=9, color=("white", "#343a40")[i])
        only = "the same processes, which only write, or only read and copy"
        ax.plot([-0.45, 1.45], [write, write], linestyle=(0, (4, 3)), color="#c92a2a", linewidth=1.2, label=only)
        ax.margins(y=0.25)
        for i, ranks_now in enumerate(loads_of(results, kind), 2):
            read = median(results["limits"][read_limit(ranks_now, kind)])
            ax.plot([i - 0.45, i + 0.45], [read, read], linestyle=(0, (4, 3)), color="#c92a2a", linewidth=1.2)
        ax.set_xticks(range(len(figures)), titles)
        ax.set_title(f"{kind.capitalize()} state of {unique:.2f} GB on {ranks} ranks, GB/s", loc="left", weight="bold")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    fig.savefig(file, dpi=140)
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--data", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "design" / "ranks.png")
    parser.add_argument("--draw", type=Path, metavar="JSON")
    for name in ("--task", "--peer", "--kind"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--raw", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.raw:
        raw_writer(args.data, args.raw)
        return
    if args.task:
        run_rank(args)
        return
    if args.draw:
        results = json.loads(args.draw.read_text())
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ckpt-ranks-", dir=args.data or args.out) as folder:
            results = run(args, Path(folder))
        (args.out / "ranks.json").write_text(json.dumps(results, indent=1) + "\n")
    show(results)
    draw(results, args.picture)


if __name__ == "__main__":
    main()
