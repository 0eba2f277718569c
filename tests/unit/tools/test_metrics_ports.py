"""The ports where health and metrics are served."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from ckpt.tools.node_arguments import monitor_port


def test_nodes_on_consecutive_ports_do_not_collide() -> None:
    for first in (1024, 7070, 7401, 64_530, 65_000):
        nodes = set(range(first, first + 20))
        monitors = {monitor_port(port) for port in nodes}
        assert len(monitors) == 20
        assert not nodes & monitors
        assert all(0 < port < 1 << 16 for port in monitors)
    assert monitor_port(0) == 0


def test_a_taken_metrics_port_is_a_warning(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path), "--listen", "127.0.0.1:0"]
        node = subprocess.Popen([*command, "--monitor", f"127.0.0.1:{port}"], stderr=subprocess.PIPE, text=True)
        assert node.stderr is not None
        lines = []
        for line in node.stderr:
            lines.append(line)
            if "serving" in line:
                break
        node.terminate()
        assert any("WARNING no health and metrics" in line and str(port) in line for line in lines), lines
        assert "(no metrics)" in lines[-1]
        assert node.wait(600) == 0
