"""Ranks that mpiexec, torchrun and a shell start save and load."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from helpers.saving_ranks import PROGRAM, run

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
