"""A training run on a CUDA device that is killed resumes with equal losses, by the contract of `ckpt.adapters.testing`."""

from __future__ import annotations

import pytest
from helpers.folders import PROGRAMS

from ckpt.adapters.testing import ResumeContract

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


class TestTrainingOnADevice(ResumeContract):
    program = PROGRAMS / "cuda_training.py"
