"""Six nodes on this machine: save, kill two, load, repair. What each step shows is printed.

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
    """A node, and the port it listens on."""
    listen = ["--listen", f"127.0.0.1:{port}", "--monitor", "127.0.0.1:0"]
    command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(folder), *listen]
    node = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert node.stderr is not None
    for line in node.stderr:
        if found := re.search(r" at 127\.0\.0\.1:(\d+)", line):
            return node, int(found[1])
    raise SystemExit("a node did not start")


def admin(what: str, url: str) -> None:
    print(f"\n$ ckpt-node admin {what} ckpt://…", flush=True)
    subprocess.run([sys.executable, "-m", "ckpt.tools.node", "admin", what, url], check=False)


def main() -> None:
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
            print("\ntwo nodes are dead; loading all the same")
            loaded = ckpt.load(url)
            print("equal to what was saved:", np.array_equal(loaded["w"], state["w"]))

            print("\nthe two come back, one of them with an empty disk")
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
