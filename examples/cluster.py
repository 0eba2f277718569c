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
from pathlib import Path

import numpy as np

import ckpt

NODES = 6


def start(folder: Path, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """Start a node; return its process, and the port on which it listens. Port 0 chooses a free one."""
    listen = ["--listen", f"127.0.0.1:{port}", "--monitor", "127.0.0.1:0"]
    command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(folder), *listen]
    node = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert node.stderr is not None
    for line in node.stderr:
        if found := re.search(r" at 127\.0\.0\.1:(\d+)", line):
            return node, int(found[1])
    raise SystemExit("a node did not start")


def admin(command: str, url: str) -> None:
    """Run a command of `ckpt-node admin`, and show its output."""
    print(f"\n$ ckpt-node admin {command} ckpt://…", flush=True)
    subprocess.run([sys.executable, "-m", "ckpt.tools.node", "admin", command, url], check=False)


def main() -> None:
    """Run the example."""
    with tempfile.TemporaryDirectory(prefix="ckpt-cluster-") as folder:
        nodes, ports = map(list, zip(*(start(Path(folder) / f"node{i}") for i in range(NODES)), strict=True))
        try:
            members = "ckpt://" + ",".join(f"127.0.0.1:{port}" for port in ports)
            url = f"{members}/run?redundancy=4+2"
            state = {"w": np.random.default_rng(0).standard_normal((4096, 4096)), "step": 1}
            began = time.perf_counter()
            saved = ckpt.save(state, url, step=1)
            seconds = time.perf_counter() - began
            print(f"saved {saved.commit.raw_bytes / 1e6:.0f} MB as 4+2 over {NODES} nodes in {seconds:.2f} s")
            admin("status", f"{members}?redundancy=4+2")

            for node in nodes[:2]:
                node.kill()
                node.wait()
            print("\ntwo nodes are dead; loading without them")
            loaded = ckpt.load(url)
            print("equal to what was saved:", np.array_equal(loaded["w"], state["w"]))

            print("\nthe two nodes start again, one of them with an empty disk")
            subprocess.run(["rm", "-rf", str(Path(folder) / "node0" / "objects")], check=True)
            for i in range(2):
                nodes[i], _ = start(Path(folder) / f"node{i}", ports[i])
            admin("repair", f"{members}?redundancy=4+2")
            admin("scrub", f"{members}?redundancy=4+2")
        finally:
            for node in nodes:
                node.kill()


if __name__ == "__main__":
    main()
