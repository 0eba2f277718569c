"""torchrun with programs/torch_rank.py, and models that are trained for a few steps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from programs import torch_models

from helpers.folders import TESTS

torch = pytest.importorskip("torch")
SMALL = ["--width=16", "--layers=1"]


def environment(**more: str) -> dict[str, str]:
    """Return the environment without the variables of a launcher, with `more`."""
    kept = {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|OMPI_|PMI|SLURM_|TORCHELASTIC", k)}
    return kept | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | more


def torchrun(size: int, program: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Return how the ranks ended. None of them outlives the call."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command = [*launcher, str(program), *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(**more), stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def trained(steps: int = 2) -> tuple[Any, Any]:
    """Return a model and its optimizer after some steps."""
    model = torch_models.make_model()
    optimizer = torch_models.make_optimizer(model)
    torch_models.train(model, optimizer, steps)
    return model, optimizer
