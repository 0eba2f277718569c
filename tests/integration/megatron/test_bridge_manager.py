"""CkptManager under the code of Megatron-Bridge that makes, calls and finishes a checkpoint manager."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from logging import getLogger
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import megatron_bridge_source as bridge_source
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

import ckpt
from ckpt.saving.handle import SaveHandle
from ckpt.storage.base.errors import InvalidArgument

SOURCE = bridge_source.source()
pytestmark = pytest.mark.skipif(
    SOURCE is None,
    reason="it needs `pip install --no-deps --ignore-requires-python megatron-bridge==0.6.2`, of which it takes the source",
)
NAME = "ckpt.adapters.megatron_bridge.CkptManager"


def nothing(*args: Any, **options: Any) -> None:
    """Stand for what the Bridge calls and what does not matter here."""


def tracker(folder: str, prefix: str | None = None) -> str:
    return os.path.join(folder, f"{prefix}_train_state.pt" if prefix else "train_state.pt")


class Weights:
    """A model of one tensor, as `generate_state_dict` of the Bridge would return it."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((4,), value)

    def state_dict(self) -> dict[str, Any]:
        return {
            "checkpoint_version": 3.0, "iteration": 1, "model": {"w": ShardedTensor.from_rank_offsets("w", self.tensor)},
            "rng_state": ShardedObject("rng_state", [{"np": np.random.get_state()}], (1, 1), (0, 0)),
        }  # fmt: skip


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    assert SOURCE is not None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = nothing  # type: ignore[assignment]
    groups = bridge_source.process_groups()
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    loaded_state = SimpleNamespace(is_enabled=lambda: False)
    yield bridge_source.install(
        SOURCE, os=os, shutil=shutil, time=time.time, torch=torch, Enum=Enum, auto=auto, contextlib=contextlib,
        Protocol=Protocol, runtime_checkable=runtime_checkable, logger=getLogger("bridge"), threading=threading,
        dataclass=dataclass, dist_checkpointing=dist_checkpointing,
        TorchDistSaveShardedStrategy=TorchDistSaveShardedStrategy, TorchDistLoadShardedStrategy=TorchDistLoadShardedStrategy,
        FullyParallelSaveStrategyWrapper=FullyParallelSaveStrategyWrapper,
        FullyParallelLoadStrategyWrapper=FullyParallelLoadStrategyWrapper,
        LayerWiseDistributedOptimizer=type("Layerwise", (), {}),
        MultiStorageClientFeature=loaded_state, TRACKER_PREFIX="latest", DATALOADER_STATE_SUBDIR="energon",
        _DIRECT_ITERATION_DIR_SENTINEL=-2, HAVE_NVRX=False, init_checkpointing_context=lambda config: {},
        _validate_target_prefix=nothing, print_rank_0=nothing, fault_tolerance=SimpleNamespace(
            on_checkpointing_start=nothing, on_checkpointing_end=nothing
        ), unwrap_model=lambda model: model, get_pg_collection=lambda model: groups, get_rng_state=nothing,
        get_rerun_state_machine=lambda: SimpleNamespace(state_dict=nothing), maybe_save_dataloader_state=nothing,
        get_checkpoint_name=lambda folder, step, release=False: os.path.join(folder, f"iter_{step:07d}"),
        generate_state_dict=lambda config, model, *rest, **more: model[0].state_dict(),
        _get_model_glu_interleave_sizes=lambda model, cfg: (None, None),
        ensure_directory_exists=lambda name, check_parent: os.makedirs(name, exist_ok=True),
        _clean_metadata_for_serialization=lambda metadata: {k: v for k, v in metadata.items() if not k.endswith("group")},
        save_sharded_modelopt_state=nothing, get_rank_safe=lambda: 0, get_checkpoint_train_state_filename=tracker,
        get_checkpoint_run_config_filename=lambda folder: os.path.join(folder, "run_config.yaml"),
        get_checkpoint_tracker_filename=lambda folder: os.path.join(folder, "latest_checkpointed_iteration.txt"),
        is_last_rank=lambda: True, wandb_utils=SimpleNamespace(on_save_checkpoint_success=nothing),
        comet_utils=SimpleNamespace(on_save_checkpoint_success=nothing), should_fire=lambda manager, event: manager is not None,
        CallbackContext=SimpleNamespace, cleanup_old_non_persistent_checkpoint=nothing, file_exists=os.path.exists,
        _resolve_checkpoint_iteration=newest_iteration,
    )  # fmt: skip
    dist.destroy_process_group()


def newest_iteration(load_dir: str, ckpt_step_override: int | None) -> tuple[int, bool]:
    file = tracker(load_dir, "latest")
    return (int(torch.load(file)["step"]) if os.path.exists(file) else -1), False


def global_state(folder: Path, step: int, **changes: Any) -> Any:
    """Return the state that the Bridge passes, with the defaults of its configuration."""
    checkpoint = SimpleNamespace(**{
        "save": str(folder), "load": str(folder), "ckpt_format": "torch_dist", "async_save": False, "async_strategy": "nvrx",
        "most_recent_k": -1, "non_persistent_ckpt_type": None, "custom_manager_class": NAME, "fully_parallel_save": True,
        "fully_parallel_load": False, "ckpt_assume_constant_structure": False, "storage_writers_per_rank": 1,
        "also_save_hf_checkpoint": False, "save_tokenizer_assets": False, "dist_ckpt_strictness": "assume_ok_unexpected",
        "dist_ckpt_optim_fully_reshardable": False, "ckpt_step": None, "exit_on_missing_checkpoint": False,
    } | changes)  # fmt: skip
    cfg = SimpleNamespace(
        checkpoint=checkpoint, rng=SimpleNamespace(data_parallel_random_init=False), dataset=None, peft=None,
        optimizer=SimpleNamespace(use_distributed_optimizer=True), dist=None, to_yaml=lambda name: Path(name).write_text("{}"),
        logger=SimpleNamespace(log_progress=False, mlflow_log_artifacts=False), ddp=None,
    )  # fmt: skip
    train_state = SimpleNamespace(step=step, state_dict=lambda: {"step": torch.tensor(step)})
    return SimpleNamespace(
        cfg=cfg, train_state=train_state, async_calls_queue=None, wandb_logger=None, mlflow_logger=None, comet_logger=None
    )


def load_contract(bridge: ModuleType, state: Any, model: Weights) -> Any:
    """Return the state dict that the Bridge loads, by the two calls that its `load_checkpoint` makes."""

    def load_checkpoint(**passed: Any) -> tuple[int, int]:
        arguments = (state.cfg.checkpoint.load, state.cfg.checkpoint)
        groups = bridge_source.process_groups()
        common, *_ = bridge._load_base_checkpoint(*arguments, rank0=True, pg_collection=groups)
        found.append(common)
        if common is None:
            return 0, 0
        found.append(bridge.dist_checkpointing.load_content_metadata(preloaded_state_dict=common))
        loaded, *_ = bridge._load_base_checkpoint(*arguments, sharded_state_dict=model.state_dict(), pg_collection=groups)
        found.append(loaded)
        return int(loaded["iteration"]), 0

    found: list[Any] = []
    bridge.load_checkpoint = load_checkpoint  # type: ignore[attr-defined]
    manager = bridge.create_checkpoint_manager(state.cfg.checkpoint)
    step, _ = manager.load(bridge.CheckpointLoadContext(state, [model], None, None))
    return step, *found


def save(bridge: ModuleType, manager: Any, state: Any, model: Weights, callbacks: Any = None) -> None:
    manager.save(bridge.CheckpointSaveContext(state, [model], None, None, 7), callbacks)


def test_save_and_load(bridge: ModuleType, tmp_path: Path) -> None:
    state = global_state(tmp_path, 1)
    assert load_contract(bridge, state, Weights(0)) == (0, None)
    manager = bridge.create_checkpoint_manager(state.cfg.checkpoint)
    assert isinstance(manager, bridge.CheckpointManager)
    assert type(manager).__name__ == "CkptManager"
    save(bridge, manager, state, Weights(3))
    assert bridge.dist_checkpointing is dist_checkpointing
    assert ckpt.load(tmp_path / "ckpt", step=1)["tensors"]["w"].tolist() == [3] * 4
    assert sorted(os.listdir(tmp_path / "iter_0000001")) == ["run_config.yaml", "train_state.pt"]
    model = Weights(0)
    step, common, metadata, loaded = load_contract(bridge, state, model)
    assert step == 1
    assert common["checkpoint_version"] == 3.0
    assert metadata["distrib_optim_sharding_type"] == "dp_reshardable"
    assert model.tensor.tolist() == [3] * 4
    assert loaded["rng_state"][0]["np"][0] == "MT19937"


def test_asynchronous_save_ends_when_it_is_committed(
    bridge: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    done = SaveHandle.done
    monkeypatch.setattr(SaveHandle, "done", lambda handle: go_on.is_set() and done(handle))
    state = global_state(tmp_path, 5, async_save=True, most_recent_k=1)
    manager = bridge.create_checkpoint_manager(state.cfg.checkpoint)
    fired: list[str] = []
    callbacks = SimpleNamespace(fire=lambda event, context: fired.append(event), user_state=None)
    save(bridge, manager, state, Weights(1), callbacks)
    manager.finalize_async_saves(state)
    assert not fired
    assert not os.path.exists(tracker(str(tmp_path), "latest"))
    go_on.set()
    manager.finalize_async_saves(state, blocking=True, terminate=True)
    assert fired == ["on_checkpoint_save"]
    assert newest_iteration(str(tmp_path), None) == (5, False)
    for step in (6, 7):
        save(bridge, manager, global_state(tmp_path, step, async_save=True, most_recent_k=1), Weights(step))
        manager.finalize_async_saves(state, blocking=True)
    assert ckpt.open(tmp_path / "ckpt").steps() == [6, 7]


class Killed(BaseException):
    """Stands for the end of the process at this moment."""


def killed(*args: Any, **options: Any) -> Any:
    raise Killed


@pytest.mark.parametrize("is_async", [False, True])
def test_a_kill_before_the_configuration_is_written(bridge: ModuleType, tmp_path: Path, is_async: bool) -> None:
    """The Bridge writes it after the trackers, so these would name a checkpoint that it can't load."""
    manager = bridge.create_checkpoint_manager(global_state(tmp_path, 1).cfg.checkpoint)
    save(bridge, manager, global_state(tmp_path, 1), Weights(1))
    state = global_state(tmp_path, 2, async_save=is_async)
    state.cfg.to_yaml = killed
    with pytest.raises(Killed):
        save(bridge, manager, state, Weights(2))
        manager.finalize_async_saves(state, blocking=True)
    assert newest_iteration(str(tmp_path), None) == (1, False)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    model = Weights(0)
    assert load_contract(bridge, global_state(tmp_path, 0), model)[0] == 1
    assert model.tensor.tolist() == [1] * 4


@pytest.mark.parametrize("damage", ["empty", "half", "names a checkpoint without a configuration"])
def test_a_torn_tracker_is_repaired(bridge: ModuleType, tmp_path: Path, damage: str) -> None:
    manager = bridge.create_checkpoint_manager(global_state(tmp_path, 1).cfg.checkpoint)
    for step in (1, 2):
        save(bridge, manager, global_state(tmp_path, step), Weights(step))
    file = Path(tracker(str(tmp_path), "latest"))
    expected = 2
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "half":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        (tmp_path / "iter_0000002" / "run_config.yaml").unlink()
        expected = 1
    model = Weights(0)
    assert load_contract(bridge, global_state(tmp_path, 0), model)[0] == 1  # the model has this number in each step
    assert model.tensor.tolist() == [expected] * 4
    assert newest_iteration(str(tmp_path), None) == (expected, False)


def test_old_checkpoints_are_deleted_when_the_new_one_is_complete(bridge: ModuleType, tmp_path: Path) -> None:
    """With most_recent_k=1, a kill during the second save must leave the first one."""
    kept: list[tuple[int, int, list[str]]] = []

    def cleanup(folder: str, leave_ckpt_num: int, do_async: bool = False) -> None:
        kept.append((leave_ckpt_num, newest_iteration(folder, None)[0], sorted(os.listdir(tmp_path / "iter_0000002"))))

    changes = {"async_save": True, "most_recent_k": 1}
    manager = bridge.create_checkpoint_manager(global_state(tmp_path, 1, **changes).cfg.checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.adapters.megatron_bridge._cleanup", cleanup)
        save(bridge, manager, global_state(tmp_path, 2, **changes), Weights(2))
        assert not kept
        manager.finalize_async_saves(global_state(tmp_path, 2), blocking=True, terminate=True)
    assert kept == [(1, 2, ["run_config.yaml", "train_state.pt"])]


def test_checkpoints_in_the_format_of_megatron_are_loaded(bridge: ModuleType, tmp_path: Path) -> None:
    """So a training run that began without ckpt continues with it."""
    state = global_state(tmp_path, 2)
    folder = tmp_path / "iter_0000002"
    folder.mkdir()
    dist_checkpointing.save(Weights(8).state_dict(), str(folder), content_metadata={})
    torch.save({"step": torch.tensor(2)}, tracker(str(tmp_path), "latest"))
    model = Weights(0)
    assert load_contract(bridge, state, model)[0] == 1
    assert model.tensor.tolist() == [8] * 4


def test_another_format_is_refused(bridge: ModuleType, tmp_path: Path) -> None:
    config = global_state(tmp_path, 1, ckpt_format="fsdp_dtensor").cfg.checkpoint
    with pytest.raises(InvalidArgument, match="checkpoint.ckpt_format='fsdp_dtensor': use 'torch_dist' with CkptManager"):
        bridge.create_checkpoint_manager(config)
