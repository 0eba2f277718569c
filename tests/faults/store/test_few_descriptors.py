"""A process that can open no more files: what it can't read now does not count as missing, damaged or unusable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_a_save_without_descriptors_makes_no_framework_unusable(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = """
import os, resource, sys
from pathlib import Path
import ckpt
ckpt.save({"w": 1}, Path(sys.argv[1], "first"), step=0)  # imports all else that a save needs
import torch

free = os.dup(0)
os.close(free)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
for more in range(6):
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, limits[1]))
    try:
        ckpt.save({"w": torch.ones(3)}, Path(sys.argv[1], f"full{more}"), step=0)
    except (OSError, ckpt.CkptError):
        pass
    else:
        assert more, "the save needs no descriptors"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
ckpt.save({"w": torch.ones(3)}, Path(sys.argv[1], "run"), step=0)
assert ckpt.load(Path(sys.argv[1], "run"))["w"].tolist() == [1, 1, 1]
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
