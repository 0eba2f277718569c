"""Arrays under equal names that differ between four real ranks: experts of a mixture, statistics of a BatchNorm, stages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.torchrun import check_on_torch_ranks

pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux has them")


def test_copies_that_differ_on_four_ranks(tmp_path: Path) -> None:
    check_on_torch_ranks("replica_check.py", 4, tmp_path, "experts", "batch_norm", "pipeline")
