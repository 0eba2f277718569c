"""FSDP2 of accelerate on the CPU, for tests/integration/transformers.

accelerate chooses FSDP only where it finds a device such as a GPU, and trains with DDP otherwise. `choose_fsdp` makes it choose
FSDP with gloo, too; all that follows is the code of accelerate and torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def choose_fsdp() -> None:
    """Do what AcceleratorState does on a GPU: take the plugin that the configuration of `accelerate launch` describes."""
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    original: Any = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin or self.fsdp_plugin

    AcceleratorState.__init__ = init  # type: ignore[method-assign]


def require_fsdp2(accelerator: Accelerator, model: Any) -> None:
    """Raise AssertionError unless a prepared model has parameters that FSDP2 has sharded."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    assert accelerator.is_fsdp2
    assert isinstance(model, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def digest(model: torch.nn.Module, optimizers: Iterable[Any]) -> str:
    """Return a digest of the whole parameters and moments, which does not depend on the number of ranks. All ranks call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    made = hashlib.sha256()
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    plain = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    for state in get_state_dict(model, plain, options=options):
        for name, value in sorted(state.items()):
            if "running_" not in name:  # buffers of BatchNorm differ between ranks
                made.update(repr((name, value.tolist() if isinstance(value, torch.Tensor) else value)).encode())
    return made.hexdigest()
