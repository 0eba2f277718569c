"""Runs six storage nodes on this machine until Ctrl-C, for experiments. `make cluster` runs it.

Usage:

    python examples/nodes.py [FOLDER]
"""

from __future__ import annotations

import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from cluster import NODES, start


def main() -> None:
    """Start the nodes, print commands to try, and wait for Ctrl-C."""
    with ExitStack() as stack:
        path = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-nodes-"))
        folder = Path(path)
        nodes = []
        for i in range(NODES):
            node, port = start(folder / f"node{i}", 7070 + 10 * i)
            stack.callback(node.wait)
            stack.callback(node.terminate)
            nodes.append(f"127.0.0.1:{port}")
        url = f"ckpt://{','.join(nodes)}"
        print(f"{NODES} nodes below {folder}. In another terminal:\n")
        print(f"  .venv/bin/ckpt-node admin status {url}")
        print(f'  .venv/bin/python -c \'import ckpt, numpy; ckpt.save({{"w": numpy.ones(10**7)}}, "{url}/run")\'')
        print(f"  .venv/bin/ckpt-inspect {url}/run --verify\n")
        print("Metrics: http://127.0.0.1:8070/metrics. Ctrl-C ends them.", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
