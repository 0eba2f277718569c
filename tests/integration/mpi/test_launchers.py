"""Ranks that mpiexec, torchrun and a shell start save and load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import launcher_environments as env
from helpers.saving_ranks import PROGRAM, clean, results_of, run

import ckpt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts and kills processes as Linux has them")


def launcher(kind: str, size: int) -> list[str]:
    if kind == "mpiexec":
        pytest.importorskip("mpi4py")
        mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
        assert mpiexec, "no mpiexec: install the wheel mpich"
        return [mpiexec, "-n", str(size), sys.executable]
    pytest.importorskip("torch")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]


@pytest.mark.parametrize(
    ("kind", "imports", "name"),
    [("mpiexec", ["mpi4py.MPI"], "MPI"), ("mpiexec", [], "environment"), ("torchrun", ["torch.distributed"], "torch"),
     ("torchrun", [], "environment")],
)  # fmt: skip
def test_ranks_of_a_launcher_save_and_load(tmp_path: Path, kind: str, imports: list[str], name: str) -> None:
    options = json.dumps({"steps": 2, "imports": imports})
    saved = run([*launcher(kind, 4), str(PROGRAM), "train", str(tmp_path), options])
    assert [(line["rank"], line["size"]) for line in saved] == [(r, 4) for r in range(4)]
    assert all(name in line["group"] for line in saved), saved
    assert ckpt.open(tmp_path).steps() == [0, 1]
    assert ckpt.open(tmp_path)[1].commit.world_size == 4
    loaded = run([*launcher(kind, 4), str(PROGRAM), "load", str(tmp_path), options])
    assert [line["step"] for line in loaded] == [1] * 4


def start_with(environments: list[dict[str, str]], what: str, url: Path, **options: object) -> list[subprocess.Popen[str]]:
    """Start a process with each of these environments: it has no other way to find the others."""
    command = [sys.executable, str(PROGRAM), what, str(url), json.dumps(options)]
    pipe = subprocess.PIPE
    return [subprocess.Popen(command, env=clean() | one, stdout=pipe, stderr=pipe, text=True) for one in environments]


BY_VARIABLES = {
    "paddle": [env.PADDLE | {"PADDLE_TRAINER_ID": str(rank)} for rank in range(2)],
    "msrun": [env.MSRUN | {"MS_NODE_ID": str(rank), "RANK_ID": str(rank)} for rank in range(4)],
    "tensorflow": [
        env.tf_config("chief", 0, chief=1, worker=2),
        *(env.tf_config("worker", i, chief=1, worker=2) for i in (0, 1)),
    ],
    "open mpi": [env.OPEN_MPI | {"OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(2)],
}


@pytest.mark.parametrize("environments", BY_VARIABLES.values(), ids=BY_VARIABLES)
def test_ranks_with_the_variables_of_a_launcher_save_and_load(tmp_path: Path, environments: list[dict[str, str]]) -> None:
    size = len(environments)
    for what in ("train", "load"):
        done = results_of(start_with(environments, what, tmp_path, steps=1))
        assert [status for status, _, _ in done] == [0] * size, done
        assert [(lines[-1]["rank"], lines[-1]["size"]) for _, lines, _ in done] == [(r, size) for r in range(size)]
    assert ckpt.open(tmp_path)[0].commit.world_size == size


def test_ranks_whose_variables_contradict_each_other_end_with_an_error(tmp_path: Path) -> None:
    """RANK and WORLD_SIZE are those of the process that started mpiexec."""
    command = [*launcher("mpiexec", 2), str(PROGRAM), "train", str(tmp_path), json.dumps({"steps": 1})]
    done = subprocess.run(command, env=clean() | {"RANK": "0", "WORLD_SIZE": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "contradicts rank 1 of 2 in the environment (PMI_RANK, PMI_SIZE)" in done.stderr
    assert not any(tmp_path.iterdir())
