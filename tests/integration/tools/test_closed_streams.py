"""Commands whose standard streams were closed by their parent write no output into their own files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.processes import until


def close_streams() -> None:
    for descriptor in (0, 1, 2):
        os.close(descriptor)


def standard_streams(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1, 2)]


def test_the_output_of_ranks_is_only_in_their_logs(tmp_path: Path) -> None:
    script = "i=0; while [ $i -lt 2000 ]; do echo marked $i; i=$((i+1)); done; echo marked >&2; sleep 1"
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path), "--", "sh", "-c", script]
    with subprocess.Popen(command, preexec_fn=close_streams) as agent:
        until((tmp_path / "logs" / "0" / "rank-0.log").exists)
        assert standard_streams(agent.pid) == ["/dev/null"] * 3
        assert agent.wait(600) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and b"marked 1\n" in path.read_bytes()]
    assert files == [tmp_path / "logs" / "0" / "rank-0.log"]


def test_a_node_has_no_file_as_a_standard_stream(tmp_path: Path) -> None:
    """gRPC writes messages to the standard error by itself."""
    command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, preexec_fn=close_streams) as node:
        try:
            until((tmp_path / "device.json").exists)
            assert standard_streams(node.pid) == ["/dev/null"] * 3
        finally:
            node.kill()
