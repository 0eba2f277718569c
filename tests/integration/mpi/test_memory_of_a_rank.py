"""A rank needs little memory besides its shard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.saving_ranks import clean

import ckpt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts and kills processes as Linux has them")
MEMORY = """
import sys
import numpy as np
import ckpt
from ckpt.groups.threads import ThreadGroup
from helpers.peak_memory import peak_bytes
from helpers.rank_threads import RemoteStore, all_well, on_ranks
import ckpt.loading.shared_read

ckpt.loading.shared_read.LocalStore = RemoteStore
ranks = int(sys.argv[2])
if sys.argv[3] == "messages":
    ckpt.loading.shared_read.SharedWindow.create = lambda *_: None
targets = [np.ones((16384, 8192 // ranks), np.float32) for _ in range(ranks)]
before = peak_bytes()

def load(group):
    mine = targets[group.rank]
    like = {"w": ckpt.Shard(mine, (16384, 8192), (0, mine.shape[1] * group.rank))}
    ckpt.load(sys.argv[1], like, group=group)
    assert (mine == 7).all()

all_well(on_ranks(ranks, load))
print(peak_bytes() - before)
"""


@pytest.mark.parametrize(("ranks", "by"), [(1, "itself"), (2, "memory"), (2, "messages")])
def test_a_rank_needs_little_memory_besides_its_shard(tmp_path: Path, ranks: int, by: str) -> None:
    """Columns of 512 MiB that were saved by rows are loaded, with and without shared reads: at most 256 MiB more than the
    shards."""
    whole = np.full((16384, 8192), 7, np.float32)
    ckpt.save({"w": whole}, tmp_path / "run", 0, codec="none")
    del whole
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "run"), str(ranks), by],
        env=clean(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) <= ranks * 256 << 20
