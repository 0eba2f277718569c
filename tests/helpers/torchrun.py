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
from typing import Any

from helpers.folders import PROGRAMS, TESTS


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


def check_on_torch_ranks(program: str, size: int, root: Path, *checks: str) -> None:
    """Run checks of a program of tests in one launch of torchrun; each rank must complete each check."""
    done = torchrun(size, PROGRAMS / program, str(root), *checks)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert len([json.loads(line) for line in re.findall(r'\{"rank".*?\}', done.stdout)]) == size * len(checks), done.stdout


def run_checks(program: dict[str, Any]) -> None:
    """The main function of a program for `check_on_torch_ranks`: it runs the functions that the command line names.

    program: the globals of the program; its ROOT becomes the folder of the tests.
    """
    import torch.distributed as dist

    program["ROOT"] = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for check in sys.argv[2:]:
        program[check]()
        dist.barrier()
        print(json.dumps({"rank": dist.get_rank(), "check": check}), flush=True)
    dist.destroy_process_group()
