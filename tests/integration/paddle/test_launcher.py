"""Ranks that paddle.distributed.launch starts save and load together, with and without Paddle's own communication."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.rank_launches import assert_two_ranks_save_and_load

PROGRAM = """
import sys
import numpy as np
import ckpt
from ckpt.groups import detect
if sys.argv[2] == "initialised":
    import paddle
    paddle.distributed.init_parallel_env()
group = detect()
rows = np.full((2, 3), group.rank + 1)
ckpt.save({"rows": ckpt.Shard(rows, (2 * group.size, 3), (2 * group.rank, 0))}, sys.argv[1], step=1)
rows[:] = 0
ckpt.load(sys.argv[1], {"rows": ckpt.Shard(rows, (2 * group.size, 3), (2 * group.rank, 0))})
assert (rows == group.rank + 1).all()
print(f"\\nloaded by {group}", flush=True)
"""


@pytest.mark.parametrize(("mode", "name"), [("plain", "environment (PADDLE_TRAINER_ID"), ("initialised", "paddle.distributed")])
def test_ranks_of_the_launcher_of_paddle_save_and_load(tmp_path: Path, mode: str, name: str) -> None:
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(tmp_path / "logs")]
    assert_two_ranks_save_and_load(launcher, PROGRAM, mode, tmp_path, "logs/workerlog.*", name)
