"""ckpt-run --launcher mpiexec: a program with its own MPI world is killed and restarted, with mpiexec from the wheel of
MPICH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.runs import have_ended

from ckpt.recovery.ranks import mpi
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base.errors import CkptError

pytest.importorskip("mpi4py", reason="mpi4py is missing (pip install ckpt-store[mpi])")


PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
import ckpt
world = MPI.COMM_WORLD
rank, size = world.rank, world.size
assert size == int(os.environ["WORLD_SIZE"]) and rank == int(os.environ["RANK"])
folder = Path(sys.argv[1])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
print(f"I am {rank} of {size}", flush=True)
state = {"w": ckpt.Shard(np.zeros(100), (100 * size,), (100 * rank,))}
with ckpt.Checkpointer(folder / "repo", every=5, keep=2, group=world) as ck:
    state, start = ck.restore(state)
    for step in range(start, 120):
        time.sleep(0.02)
        state["w"].local[...] += world.allreduce(np.sin(step + rank))
        (folder / f"at-{rank}").write_text(str(step))
        ck.step(step, state)
np.save(folder / f"end-{rank}.npy", state["w"].local)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_mpi_job_is_restarted_after_a_killed_or_stopped_rank(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "ckpt.tools.run", "-n", "3", "--launcher", "mpiexec", "--run-dir", str(tmp_path / "run")]
    run = subprocess.Popen([*command, "--", sys.executable, str(program), str(tmp_path)], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 600
    while (time.monotonic() < end and not (tmp_path / "at-1").exists()) or int((tmp_path / "at-1").read_text() or 0) < 12:
        time.sleep(0.02)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)]
    os.kill(pids[1], number)
    _, stderr = run.communicate(timeout=600)
    assert run.returncode == 0, stderr
    kinds = [e.kind for e in SqliteRunLog(tmp_path / "run").entries() if e.kind != "lead"]
    assert kinds == ["run", "start", "failure", "decision", "start", "end"], stderr
    assert have_ended(pids)
    want = np.zeros(100)
    for step in range(120):
        want += sum(np.sin(step + rank) for rank in range(3))
    for rank in range(3):
        assert np.allclose(np.load(tmp_path / f"end-{rank}.npy"), want, rtol=1e-12)
        assert f"I am {rank} of 3" in (tmp_path / "run" / "logs" / "1" / f"rank-{rank}.log").read_text()


def test_an_mpi_program_that_cannot_start_is_reported_in_the_logs(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF of nothing")
    program.chmod(0o755)
    command = [sys.executable, "-m", "ckpt.tools.run", "-n", "2", "--launcher", "mpiexec", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([*command, "--", str(program)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs" / "0").iterdir())
    assert f"{program} can't be started: Exec format error" in logs


@pytest.mark.parametrize("name", ["run-{a}", "run-{}", "run-{0}", "run-{{}}", "run-%d", "run $HOME * 'x"])
def test_the_folder_of_a_run_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    command = [sys.executable, "-m", "ckpt.tools.run", "-n", "2", "--launcher", "mpiexec", "--run-dir", str(folder), "--"]
    program = [sys.executable, "-c", "import os; print('rank', os.environ['RANK'])"]
    done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=600, check=False)
    logs = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("rank-*.log")}
    assert done.returncode == 0, (done.stderr, logs)
    assert logs == {f"{name}/logs/0/rank-{rank}.log": f"rank {rank}\n" for rank in range(2)}


def test_the_mpi_rank_is_read_from_the_environment() -> None:
    assert mpi.mpi_rank({"PMI_RANK": "2"}) == 2
    assert mpi.mpi_rank({"OMPI_COMM_WORLD_RANK": "1"}) == 1
    with pytest.raises(CkptError, match="this mpiexec sets none of PMI_RANK"):
        mpi.mpi_rank({})
