"""What the CheckpointManager of ckpt.adapters.orbax reads: the steps of all tiers, by the ranks that save together.

It reads the arguments of Orbax by their attributes, so Orbax itself is not needed here.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.processes import python

import ckpt
from ckpt.adapters.orbax import CheckpointManager

KILLED_JOB = """
import sys
from types import SimpleNamespace
import numpy as np
import ckpt
from ckpt.adapters.orbax import CheckpointManager
from ckpt.storage.base.failpoints import set_failpoints

manager = CheckpointManager(sys.argv[1], tiers=[ckpt.Tier(sys.argv[2])])
for step in 1, 2:
    manager.save(step, SimpleNamespace(item={"w": np.full(3, float(step))}), metrics={"loss": step})
    manager.wait_until_finished()
    set_failpoints("promote.commit=kill")
"""


@pytest.fixture
def killed(tmp_path: Path) -> CheckpointManager:
    """Return the manager of a job after the previous one was killed while it copied step 2 to the repository of record."""
    job = python(KILLED_JOB, tmp_path / "run", tmp_path / "near")
    job.communicate(timeout=600)
    assert job.returncode == -signal.SIGKILL
    assert ckpt.open(tmp_path / "run").steps() == [1]
    return CheckpointManager(tmp_path / "run", tiers=[ckpt.Tier(tmp_path / "near")])


def test_a_step_that_only_a_near_tier_has_is_restored(killed: CheckpointManager) -> None:
    with killed as manager:
        assert manager.latest_step() == 2
        assert manager.metrics(2) == {"loss": 2}
        assert manager.metrics(3) is None
        assert manager.restore(None, SimpleNamespace(item={"w": np.zeros(3)}))["w"].tolist() == [2, 2, 2]
        assert manager.restore(None, SimpleNamespace(item=None))["w"].tolist() == [2, 2, 2]
        assert manager.restore(2)["w"].tolist() == [2, 2, 2]


def test_a_manager_of_one_rank_restores_without_the_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")  # the other rank never comes
    with CheckpointManager(tmp_path, group=None) as manager:
        manager.save(1, SimpleNamespace(item={"w": np.ones(3)}), metrics={"loss": 1})
        manager.wait_until_finished()
        assert manager.metrics(1) == {"loss": 1}
        assert manager.restore(1, SimpleNamespace(item={"w": np.zeros(3)}))["w"].tolist() == [1, 1, 1]
        assert manager.restore(1)["w"].tolist() == [1, 1, 1]
