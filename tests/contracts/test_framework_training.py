"""A training run that is killed resumes with equal losses, by the contract of `ckpt.adapters.testing`."""

from __future__ import annotations

import pytest
from helpers.folders import PROGRAMS

from ckpt.adapters.testing import ResumeContract

pytest.importorskip("torch")


class TestTorch(ResumeContract):
    program = PROGRAMS / "torch_training.py"
