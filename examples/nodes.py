"""Runs six storage nodes on this machine until Ctrl-C or SIGTERM, for experiments. `make cluster` runs it.

Usage:

    python examples/nodes.py [FOLDER [FIRST_PORT]]

FIRST_PORT is the port of the first node, by default 7070; 0 chooses free ports. The nodes log to files in the folder.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from cluster import NODES, Node, start


def start_all(folder: Path, first_port: int, stack: ExitStack) -> list[Node]:
    """Start the nodes, which the stack ends."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = []
    for i in range(NODES):
        port = first_port + 10 * i if first_port else 0
        node = start(folder / f"node{i}", port, port + 1000 if port else 0)
        stack.callback(node.process.wait)
        stack.callback(node.process.terminate)
        nodes.append(node)
    return nodes


def main() -> None:
    """Start the nodes, print commands to try, and wait for Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        path = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-nodes-"))
        try:
            nodes = start_all(Path(path), int(sys.argv[2]) if len(sys.argv) > 2 else 7070, stack)
            url = f"ckpt://{','.join(f'127.0.0.1:{node.port}' for node in nodes)}"
            print(f"{NODES} nodes below {path}. In another terminal:\n")
            print(f"  .venv/bin/ckpt-node admin status {url}")
            print(f'  .venv/bin/python -c \'import ckpt, numpy; ckpt.save({{"w": numpy.ones(10**7)}}, "{url}/run")\'')
            print(f"  .venv/bin/ckpt-inspect {url}/run --verify\n")
            print(f"Metrics: {', '.join(f'http://{node.metrics}/metrics' for node in nodes if node.metrics)}")
            print("Ctrl-C ends the nodes.", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
