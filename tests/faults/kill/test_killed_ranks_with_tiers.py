"""Ranks that are killed while they save into tiers lose no step."""

from __future__ import annotations

import numpy as np
from helpers.processes import python
from helpers.tier_folders import TierFolders
from helpers.tier_folders import tier_folders as tier_folders

import ckpt

RANK = """
import os, sys, ckpt
from pathlib import Path
from helpers.tier_folders import TierFolders, shard_of
rank = int(os.environ["RANK"])
with TierFolders(Path(sys.argv[1])).open(group="auto", timeout=60) as ck:
    state, start = ck.restore(shard_of(rank, 2, 0))
    assert start == 0 or (state["w"].local == shard_of(rank, 2, start - 1)["w"].local).all()
    print("start", start, flush=True)
    for step in range(start, start + int(sys.argv[2])):
        ck.step(step, shard_of(rank, 2, step)).result()
        print(step, flush=True)
"""


def test_killed_ranks_with_tiers_lose_no_acknowledged_step(tier_folders: TierFolders) -> None:
    """The ranks know of each other by the environment only. Every acknowledged step is found again."""
    newest = -1
    for attempt, (steps, victim) in enumerate(((1000, 1), (1000, 0), (5, None))):
        ranks = [
            python(
                RANK, tier_folders.base, steps,
                env={"RANK": str(rank), "WORLD_SIZE": "2", "CKPT_RUN_ID": f"{tier_folders.base.name}-{attempt}"},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            lines = [rank.stdout.readline().split() for rank in ranks if rank.stdout]
            assert lines[0] == lines[1] != [], [rank.communicate()[1] for rank in ranks if rank.poll()]
            assert int(lines[0][1]) > newest, "an acknowledged step is lost"
            if victim is None:
                assert [rank.wait(600) for rank in ranks] == [0, 0]
                break
            stdout = ranks[1 - victim].stdout
            assert stdout is not None
            newest = max(int(stdout.readline()) for _ in range(5))
            ranks[victim].kill()
            ranks[1 - victim].kill()
            newest = max([newest, *map(int, stdout.read().split())])
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    found = ckpt.open(tier_folders.run).steps()
    assert found[-1] == int(lines[0][1]) + 4
    for step in found:
        assert np.array_equal(ckpt.load(tier_folders.run, step=step)["w"], np.arange(6400.0).reshape(64, 100) * (step + 1))
