"""`make cluster`: six nodes for experiments, the commands that it prints, and its end."""

from __future__ import annotations

import re
import runpy
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.folders import EXAMPLES

COMMAND = [sys.executable, str(EXAMPLES / "nodes.py")]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process and what it has printed when its nodes serve."""
    process = subprocess.Popen([*COMMAND, str(tmp_path / "nodes"), "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("Ctrl-C"):
            break
    yield process, printed
    process.terminate()
    process.wait(600)
    process.stdout.close()


def serves(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def test_the_printed_commands_and_metrics_work(cluster: tuple[subprocess.Popen[str], str]) -> None:
    _, printed = cluster
    commands = re.findall(r"^  \.venv/bin/(.*)$", printed, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", f"{Path(sys.executable).parent}/{command}"], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
    assert "step 0  OK" in done.stdout
    metrics = re.findall(r"http://[\d.:]+/metrics", printed)
    assert len(metrics) == 6
    for url in metrics:
        with urllib.request.urlopen(url, timeout=30) as page:
            assert b"ckpt_node_" in page.read()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_a_signal_ends_the_nodes_too(cluster: tuple[subprocess.Popen[str], str], number: int, status: int) -> None:
    process, printed = cluster
    addresses = set(re.findall(r"127\.0\.0\.1:\d+", printed))
    assert len(addresses) == 12
    assert all(map(serves, addresses))
    process.send_signal(number)
    assert process.wait(600) == status
    assert not any(map(serves, addresses))


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = subprocess.run([*COMMAND, str(tmp_path), str(port)], capture_output=True, text=True, timeout=600)
    assert refused.returncode == 1
    assert f"a node did not start: ckpt-node: can't listen on 127.0.0.1:{port}" in refused.stderr


def test_a_node_whose_metrics_port_is_taken_serves_without_metrics(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        node = runpy.run_path(str(EXAMPLES / "cluster.py"))["start"](tmp_path / "node", 0, taken.getsockname()[1])
    try:
        assert node.metrics is None
        assert serves(f"127.0.0.1:{node.port}")
    finally:
        node.process.terminate()
        node.process.wait(600)
