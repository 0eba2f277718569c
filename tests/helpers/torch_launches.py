"""torchrun with programs/torch_rank.py, and models that are trained for a few steps."""

from __future__ import annotations

from typing import Any

import pytest
from programs import torch_models

torch = pytest.importorskip("torch")
SMALL = ["--width=16", "--layers=1"]


def trained(steps: int = 2) -> tuple[Any, Any]:
    """Return a model and its optimizer after some steps."""
    model = torch_models.make_model()
    optimizer = torch_models.make_optimizer(model)
    torch_models.train(model, optimizer, steps)
    return model, optimizer
