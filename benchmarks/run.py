"""Compares this project with its peers and the limits of the machine in one run; prints tables and draws a plot.

    python benchmarks/run.py                        a training state of 2 GiB
    python benchmarks/run.py --leaves 20000         very many small leaves
    python benchmarks/run.py --only h5py            ckpt and one peer
    python benchmarks/run.py --draw results.json    the tables and the plot of an earlier run

A round measures the limits and each peer once, each in a new process, and rounds differ in their order. A ratio is computed
within each round. So if the machine is slower for a while, or shared, both parts of a ratio are slower.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import picture
import report
from peers import OTHERS, OURS, PEERS
from results import LazyResult, PeerResult, Results
from results import read as read_results
from rich.console import Console

HERE = Path(__file__).resolve().parent
CHILD_SECONDS = 1800
VERSIONS = (
    "ckpt-store", "torch", "safetensors", "orbax-checkpoint", "h5py", "zarr", "runai-model-streamer", "fastsafetensors",
    "tensorizer", "torchsnapshot",
)  # fmt: skip
IMPORT = """
import sys, time
began = time.perf_counter()
import ckpt
print(time.perf_counter() - began)
assert "torch" not in sys.modules
"""

console = Console(width=None if sys.stdout.isatty() else 110)


class Failed(Exception):
    """A child process ended without a result."""


def run(args: argparse.Namespace, data: Path) -> Results:
    """Measure everything in rounds. Each round measures the limits and each peer once, in another order than the one before."""
    keys = [*OURS, *(key for key in args.only or OTHERS if key not in OURS)]
    results = Results(machine(data), time.strftime("%Y-%m-%d %H:%M"), versions(), args.gib, args.leaves, args.repeat)
    results.import_seconds = [import_seconds() for _ in range(max(3, args.repeat))]
    if not args.leaves:  # lazy staging copies large and small leaves alike, so one state is enough
        measure_lazy(results, args, data)
    for number in range(args.repeat):
        first = number * len(keys) // args.repeat
        console.print(f"round {number + 1} of {args.repeat}", highlight=False)
        measure_limits(results, args, data)
        for key in [*keys[first:], *keys[:first]]:
            if key not in results.missing:
                measure_peer(results, key, args, data)
    return results


def measure_limits(results: Results, args: argparse.Namespace, data: Path) -> None:
    """Add samples of the limits."""
    try:
        found = child("limits", args, data, 1)
    except Failed as error:
        print_result("limits", f"failed: {error}")
        return
    for name, samples in found.items():
        results.limits.setdefault(name, []).extend(samples)
    print_result("limits", f"{len(found)} measured")


def measure_peer(results: Results, key: str, args: argparse.Namespace, data: Path) -> None:
    """Add the result of a peer, or the reason why it is missing."""
    peer = PEERS[key]
    if missing := peer.missing():
        results.missing[key] = "not installed"
        print_result(peer.title, f"not installed: pip install {' '.join(missing)}")
        return
    try:
        found = PeerResult(**child(key, args, data, 1))
    except Failed as error:
        results.missing[key] = "failed"
        results.peers.pop(key, None)  # its rounds would not match those of the others
        print_result(peer.title, f"failed: {error}")
        return
    print_result(
        peer.title,
        f"stall {found.stall_ms:6.0f} ms   durable {found.durable_gbs:5.2f}   cold load {found.cold_gbs:5.2f}   "
        f"hot load {found.hot_gbs:5.2f} GB/s",
    )
    if key in results.peers:
        results.peers[key].add_round(found)
    else:
        results.peers[key] = found


def measure_lazy(results: Results, args: argparse.Namespace, data: Path) -> None:
    """Add the result of lazy staging, or the reason why it is missing."""
    try:
        results.lazy = LazyResult(**child("lazy", args, data, args.repeat))
        print_result("ckpt async, lazy", f"stall {results.lazy.stall_ms:6.1f} ms")
    except Failed as error:
        results.missing["lazy"] = "failed"
        print_result("ckpt async, lazy", f"failed: {error}")


def child(what: str, args: argparse.Namespace, data: Path, repeat: int) -> dict[str, Any]:
    """Measure one thing `repeat` times by one.py in a new process, and return its result."""
    result = data / f"{what}.json"
    command = [sys.executable, str(HERE / "one.py"), what, "--data", str(data), "--result", str(result)]
    command += ["--gib", str(args.gib), "--leaves", str(args.leaves), "--repeat", str(repeat)]
    with console.status(f"measuring {what} …"):
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise Failed(f"no result after {CHILD_SECONDS} s") from None
        finally:
            shutil.rmtree(data / what, ignore_errors=True)
    if ended.returncode:
        raise Failed((ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1])
    found: dict[str, Any] = json.loads(result.read_text())
    result.unlink()
    return found


def import_seconds() -> float:
    """Return the seconds of `import ckpt` in a new interpreter; fail if that imports torch."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)


def print_result(name: str, text: str) -> None:
    """Print the result of one measurement."""
    console.print(f"{name:22} {text}", highlight=False, markup=False, soft_wrap=True)


def machine(data: Path) -> str:
    """Return processor, memory, disk and system as one line."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{processor()}, {os.cpu_count()} cores, {gib:.0f} GiB, {disk(data)}, {platform.system()} {platform.release()}"


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def disk(data: Path) -> str:
    """Return the file system and the device of a folder."""
    import psutil

    mounts = [m for m in psutil.disk_partitions(all=True) if data.resolve().is_relative_to(m.mountpoint)]
    found = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return f"{found.fstype} on {found.device}" if found else "unknown disk"


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def show(results: Results, out: Path) -> None:
    """Print the tables, write them as Markdown, and draw the plot."""
    report.show(results, console)
    (out / "results.md").write_text(report.markdown(results))
    picture.draw(results, out / "results.png")
    console.print(f"written to {out}: results.json, results.md, results.png", highlight=False, soft_wrap=True)


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2, help="size of the state and of the limits (default: 2)")
    parser.add_argument("--leaves", type=int, default=0, metavar="N", help="N leaves of 1-64 KiB instead of large ones")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; each process saves once more as warm-up (default: 3)")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), metavar="PEER", help=f"peers: {' '.join(OTHERS)}")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder on the disk to measure (default: in --out)")
    parser.add_argument("--out", type=Path, default=HERE / "out", metavar="DIR", help="for results (default: %(default)s)")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing; show the results of an earlier run")
    args = parser.parse_args()
    if args.repeat < 1 or args.gib <= 0 or args.leaves < 0:
        parser.error("--repeat is at least 1, --gib more than 0, --leaves not negative")
    return args


def main() -> None:
    """Run the benchmark, or show the results of an earlier run."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.draw:
        show(read_results(args.draw), args.out)
        return
    where = args.data or args.out
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=where) as folder:
        data = Path(folder).resolve()
        console.print(f"measuring in {data} ({disk(data)}); it is removed at the end", highlight=False, soft_wrap=True)
        results = run(args, data)
    results.write(args.out / "results.json")
    show(results, args.out)


if __name__ == "__main__":
    main()
