"""Ranks that msrun starts save and load together, with and without MindSpore's own communication."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from helpers.rank_launches import assert_two_ranks_save_and_load

PROGRAM = """
import os, sys
import numpy as np
import ckpt
from ckpt.groups import detect
if sys.argv[2] == "initialised":
    import mindspore
    mindspore.set_device("CPU")
    mindspore.communication.init()
elif os.environ["MS_ROLE"] == "MS_SCHED":
    sys.exit()  # the scheduler runs the program, too; with MindSpore it ends in init()
group = detect()
rows = np.full((2, 3), group.rank + 1)
state = {"rows": ckpt.Shard(rows, (2 * group.size, 3), (2 * group.rank, 0))}
if sys.argv[2] == "initialised":
    state["random"] = ckpt.RandomState()
ckpt.save(state, sys.argv[1], step=1)
rows[:] = 0
ckpt.load(sys.argv[1], state)
assert (rows == group.rank + 1).all()
print(f"\\nloaded by {group}", flush=True)
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(("mode", "name"), [("plain", "environment (MS_NODE_ID"), ("initialised", "mindspore.communication")])
def test_ranks_of_msrun_save_and_load(tmp_path: Path, mode: str, name: str) -> None:
    launcher = [str(Path(sys.executable).parent / "msrun"), "--worker_num=2", "--local_worker_num=2", "--node_rank=0"]
    launcher += [f"--master_port={_free_port()}", f"--log_dir={tmp_path / 'logs'}", "--join=True"]
    assert_two_ranks_save_and_load(launcher, PROGRAM, mode, tmp_path, "logs/worker_*.log", name)
