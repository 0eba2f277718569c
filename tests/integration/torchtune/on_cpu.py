"""Runs a distributed recipe of torchtune on processors: tune run … on_cpu.py --config … recipe=NAME.

The recipes ask for the memory of an accelerator, and that of LoRA for NCCL, which a processor does not have.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed
from torchtune import training

_init_process_group = torch.distributed.init_process_group


def init_process_group(*_: Any, **__: Any) -> None:
    """Create the process group with gloo alone."""
    _init_process_group("gloo")


torch.distributed.init_process_group = init_process_group
training.get_memory_stats = lambda *_, **__: {}
training.log_memory_stats = lambda *_: None
torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda *_: None

(name,) = [argument.partition("=")[2] for argument in sys.argv if argument.startswith("recipe=")]
found = [Path(folder) / "recipes" / f"{name}.py" for folder in sys.path if (Path(folder) / "recipes" / f"{name}.py").exists()]
sys.argv = [argument for argument in sys.argv if not argument.startswith("recipe=")]
runpy.run_path(str(found[0]), run_name="__main__")
