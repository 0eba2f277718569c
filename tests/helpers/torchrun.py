"""Programs of tests under torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from helpers.folders import PROGRAMS, TESTS


def check_on_torch_ranks(program: str, size: int, root: Path, *checks: str) -> None:
    """Run checks of a program of tests in one launch of torchrun; each rank must complete each check."""
    kept = {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|OMPI_|PMI|SLURM_|TORCHELASTIC", k)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    process = subprocess.Popen(
        [*launcher, str(PROGRAMS / program), str(root), *checks],
        env=kept | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out + err[-6000:]
    assert len([json.loads(line) for line in re.findall(r"\{.*?\}", out)]) == size * len(checks), out
