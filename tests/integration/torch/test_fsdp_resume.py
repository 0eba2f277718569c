"""A plain optimizer beside a model that fully_shard has cut: a fresh one goes on from a step, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support import TESTS

pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux has them")

CHECKS = ["adamw-fresh", "adamw-used", "sgd-restore", "groups-fresh"]


def test_a_fresh_optimizer_gets_moments_that_are_cut_as_its_parameters(tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|OMPI_|PMI|SLURM_|TORCHELASTIC", k)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*launcher, str(TESTS / "fsdp_program.py"), str(tmp_path), *CHECKS],
        env=kept | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out + err[-6000:]
    assert len([json.loads(line) for line in re.findall(r"\{.*?\}", out)]) == 2 * len(CHECKS), out
