"""A rank that the fork server of ckpt-run starts finds Paddle as a new interpreter does."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.fork_servers import Starter, run_cold, run_warm, script
from helpers.fork_servers import start_fork_server as start_fork_server

from ckpt.training import import_report

SCRIPT = """
    import sys
    warm = "numpy" in sys.modules
    import numpy
    import paddle
    from ckpt.training import import_report
    import_report.write_report()
    print("warm" if warm else "cold", "dynamic" if paddle.in_dynamic_mode() else "static")
"""


def test_paddle_is_in_its_dynamic_mode_after_a_warm_restart(start_fork_server: Starter, tmp_path: Path) -> None:
    """Paddle turns this mode on when it is imported, for the thread of the import alone."""
    command = [sys.executable, script(tmp_path / "here", SCRIPT)]
    page = str(tmp_path / "page")
    assert run_cold(command, tmp_path / "cold", CKPT_PULSE=page, OMP_NUM_THREADS="1") == 0
    assert (tmp_path / "cold").read_text().endswith("cold dynamic\n")
    fork_server = start_fork_server(command, import_report.report_path(page), OMP_NUM_THREADS="1")
    assert fork_server.is_ready, fork_server.reason
    assert run_warm(fork_server, tmp_path / "warm", 1, OMP_NUM_THREADS="1") == 0
    assert (tmp_path / "warm").read_text().endswith("warm dynamic\n")
