"""Starts six nodes on this machine, saves a state, kills two nodes, loads the state, and repairs the namespace.

Usage:

    python examples/cluster.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ckpt

NODES = 6


@dataclass(frozen=True)
class Node:
    """A node that serves."""

    process: subprocess.Popen[bytes]
    port: int
    metrics: str | None
    """The address of its metrics; None if their port is taken."""


def start(folder: Path, port: int = 0, metrics_port: int = 0) -> Node:
    """Start a node, and return it once it accepts calls. It logs to a file beside its folder. Port 0 chooses a free port."""
    addresses = ["--listen", f"127.0.0.1:{port}", "--monitor", f"127.0.0.1:{metrics_port}"]
    log = folder.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "ckpt.tools.node", "--data", str(folder), *addresses], stderr=file)
    try:
        while True:
            ended = process.poll() is not None
            text = log.read_text()
            if found := re.search(r"serving .* at 127\.0\.0\.1:(\d+) \((?:metrics at ([\d.:]+)|no metrics)\)", text):
                return Node(process, int(found[1]), found[2])
            if ended:
                raise SystemExit(f"a node did not start: {text.strip()}")
            time.sleep(0.02)
    except BaseException:  # also Ctrl-C and SIGTERM
        process.kill()
        raise


def admin(command: str, url: str) -> None:
    """Run a command of `ckpt-node admin`, and show its output."""
    print(f"\n$ ckpt-node admin {command} ckpt://…", flush=True)
    subprocess.run([sys.executable, "-m", "ckpt.tools.node", "admin", command, url], check=False)


def main() -> None:
    """Run the example."""
    with tempfile.TemporaryDirectory(prefix="ckpt-cluster-") as folder:
        nodes = [start(Path(folder) / f"node{i}") for i in range(NODES)]
        try:
            members = "ckpt://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
            url = f"{members}/run?redundancy=4+2"
            state = {"w": np.random.default_rng(0).standard_normal((4096, 4096)), "step": 1}
            began = time.perf_counter()
            saved = ckpt.save(state, url, step=1)
            seconds = time.perf_counter() - began
            print(f"saved {saved.commit.raw_bytes / 1e6:.0f} MB as 4+2 over {NODES} nodes in {seconds:.2f} s")
            admin("status", f"{members}?redundancy=4+2")

            for node in nodes[:2]:
                node.process.kill()
                node.process.wait()
            print("\ntwo nodes are dead; loading without them")
            loaded = ckpt.load(url)
            print("equal to what was saved:", np.array_equal(loaded["w"], state["w"]))

            print("\nthe two nodes start again, one of them without its objects")
            subprocess.run(["rm", "-rf", str(Path(folder) / "node0" / "objects")], check=True)
            for i in range(2):
                nodes[i] = start(Path(folder) / f"node{i}", nodes[i].port)
            admin("repair", f"{members}?redundancy=4+2")
            admin("scrub", f"{members}?redundancy=4+2")
        finally:
            for node in nodes:
                node.process.kill()


if __name__ == "__main__":
    main()
