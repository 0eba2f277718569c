"""Arrays with equal names that differ between four real ranks: experts of a mixture, statistics of a BatchNorm, pipeline
stages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.forked_ranks import run_checks_on_ranks

pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux has them")


def test_replicas_that_differ_between_four_ranks_are_detected(tmp_path: Path) -> None:
    run_checks_on_ranks("replica_check.py", 4, tmp_path, "experts", "batch_norm", "pipeline", "wrapped_buffers")
