"""Ranks that paddle.distributed.launch starts save and load together, with and without Paddle's own communication."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt

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
    program, logs = tmp_path / "program.py", tmp_path / "logs"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(logs)]
    kept = {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|PADDLE_|PMI|SLURM_", k)}
    done = subprocess.run(
        [*launcher, str(program), str(tmp_path / "run"), mode],
        env=kept,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    printed = "".join(file.read_text() for file in sorted(logs.glob("workerlog.*")))
    assert done.returncode == 0, done.stdout[-2000:] + printed[-4000:]
    assert sorted(re.findall(r"loaded by .*(rank \d of 2)", printed))[-2:] == ["rank 0 of 2", "rank 1 of 2"]
    assert f"loaded by {name}" in printed
    assert ckpt.open(tmp_path / "run")[1].commit.world_size == 2
