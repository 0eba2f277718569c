"""The checkpointing module of Megatron-Bridge without its imports: its own functions and classes, taken from its source.

The Bridge needs Python 3.12, CUDA kernels and packages that do not run on a CPU. So its code of a save and a load runs here
with stand-ins for what it calls in other modules: those return what the Bridge's modules would, for one rank.
"""

from __future__ import annotations

import ast
import sys
import types
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODULE = "megatron.bridge.training.checkpointing"
TAKEN = {
    "CheckpointType", "CheckpointSaveContext", "CheckpointLoadContext", "CheckpointManager", "DefaultCheckpointManager",
    "create_checkpoint_manager", "schedule_async_save", "maybe_finalize_async_save", "is_empty_async_queue", "save_checkpoint",
    "_load_base_checkpoint", "_load_global_dist_base_checkpoint", "_get_checkpoint_format", "find_checkpoint_rank_0",
    "_record_dataloader_state_dir", "_build_sharded_state_dict_metadata", "_get_non_persistent_iteration",
}  # fmt: skip


def source() -> Path | None:
    """Return the file of the module in the installed Megatron-Bridge, None if it is not installed."""
    try:
        found = files("megatron-bridge") or ()
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in found if str(file).endswith("bridge/training/checkpointing.py")), None)


def install(file: Path, **stand_ins: Any) -> types.ModuleType:
    """Make the module, with the definitions of TAKEN and stand-ins for the rest, importable under its name."""
    tree = ast.parse(file.read_text())
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree.body = [future, *(node for node in tree.body if getattr(node, "name", None) in TAKEN)]
    assert {node.name for node in tree.body[1:]} == TAKEN  # type: ignore[attr-defined]
    module = types.ModuleType(MODULE)
    vars(module).update(stand_ins)
    for name in ("megatron.bridge", "megatron.bridge.training"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []  # type: ignore[attr-defined]
    sys.modules["megatron.bridge.training"].checkpointing = module  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    exec(compile(ast.fix_missing_locations(tree), str(file), "exec"), vars(module))  # the Bridge's own code
    return module


def process_groups() -> SimpleNamespace:
    """Return the process groups of one rank."""
    one = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    return SimpleNamespace(dp_cp=one, tp=one, pp=one, dp=one)
