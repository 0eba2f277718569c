"""A plain optimizer for a model that fully_shard has sharded: a fresh one continues from a step, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.forked_ranks import run_checks_on_ranks

pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux has them")

CHECKS = ["adamw-fresh", "adamw-used", "sgd-restore", "groups-fresh"]


def test_a_fresh_optimizer_gets_moments_sharded_like_its_parameters(tmp_path: Path) -> None:
    run_checks_on_ranks("fsdp_training.py", 2, tmp_path, *CHECKS)
