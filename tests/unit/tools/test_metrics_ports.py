"""The ports where health and metrics are served, and the package that they need."""

from __future__ import annotations

import os
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


def test_a_node_without_the_package_of_metrics_names_it(tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('it is not installed')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    node = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": paths})
    assert node.returncode == 1
    assert "ckpt-node needs the package prometheus_client" in node.stderr
    assert node.stderr.endswith("pip install 'ckpt-store[node]'\n")
    assert node.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()
