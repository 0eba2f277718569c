"""One rank under torchrun, for tests/integration/deepspeed: `deepspeed_checks.py FOLDER CHECK…` runs the checks in turn.

The whole state of an engine is read with DeepSpeed's own functions (safe_get_full_…), and compared with what ckpt saves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from helpers.deepspeed_cpu import converts_groups_of_stage_3
from helpers.failing_store import failing
from helpers.torchrun import run_checks

import ckpt
from ckpt.adapters.deepspeed import EngineState, attach
from ckpt.adapters.torch import ModelState
from programs.deepspeed_training import Model, config, make_engine, parameter_groups, train_step

ROOT = Path()  # set by `run_checks`

SAVED = [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16"), (1, "bf16-fp32-grads")]
MOMENTS = ("exp_avg", "exp_avg_sq")


def trained_engine(stage: int, precision: str, steps: int = 3, **options: Any) -> Any:
    engine = make_engine(stage, precision, **options)
    for step in range(steps):
        train_step(engine, step)
    return engine


def whole_state(engine: Any) -> dict[str, Any]:
    """Return all master weights, moments and buffers by name, as DeepSpeed gathers them."""
    found = {}
    plain = engine.optimizer is engine.basic_optimizer
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # DeepSpeed links only the state of the first group
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            found[f"model.{name}"] = gathered(parameter)
            continue
        found[f"model.{name}"] = parameter.detach() if plain else safe_get_full_fp32_param(parameter)
        for key in MOMENTS:
            value = engine.optimizer.state[parameter][key] if plain else safe_get_full_optimizer_state(parameter, key)
            found[f"optimizer.state.{name}.{key}"] = value
    found |= {f"model.{name}": buffer for name, buffer in engine.module.named_buffers()}
    return {name: value.detach().clone() for name, value in found.items()}


def gathered(parameter: Any) -> Any:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def model_weights(engine: Any) -> dict[str, Any]:
    """Return the weights with which the model computes."""
    return {f"model.{name}": gathered(parameter) for name, parameter in engine.module.named_parameters()}


def stored_state(url: Path) -> dict[str, Any]:
    """Return the arrays of the newest step, by name."""
    state = ckpt.load(url, group=None)
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        found |= {f"optimizer.state.{name}.{key}": values[key] for key in MOMENTS}
    return found


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name


def saved_in(stage: int, precision: str) -> Path:
    return ROOT / f"stage{stage}-{precision}"


def save_stages() -> None:
    """Save each stage after three steps; what is stored is what DeepSpeed gathers, and no element is stored twice."""
    for stage, precision in SAVED:
        engine = trained_engine(stage, precision)
        attached = attach(engine, saved_in(stage, precision), keep=2)
        assert engine.save_checkpoint("unused", tag=f"first of {stage}", client_state=client_state()) is True
        attached.close()
        expected = whole_state(engine)
        stored = stored_state(saved_in(stage, precision))
        assert stored["model.head.weight"] is stored["model.embed.weight"]
        del stored["model.head.weight"]
        require_same(stored, expected)
        frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
        for name, value in stored.items():
            is_low = precision.startswith("bf16") and name.removeprefix("model.") in frozen
            assert value.dtype == (torch.int64 if name == "model.seen" else torch.bfloat16 if is_low else torch.float32), name
        trainable = sum(p.numel() for n, p in Model().named_parameters() if n not in frozen)
        commit = ckpt.open(saved_in(stage, precision)).latest().commit
        assert 12 * trainable <= commit.raw_bytes < 12 * trainable + 20_000, commit.raw_bytes  # the rest: the generators


def client_state() -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        "epoch": 3 + rank,
        "history": [0.5, rank],
        "array": np.arange(5) + rank,
        "tensor": torch.full((2,), rank),
        "number": np.float32(rank),
    }


def load_stages() -> None:
    """Load each saved step into an engine of another stage on this number of ranks, and train on."""
    targets = {1: (1, 0, 3, 2, 1), 2: (3, 2, 1, 2, 3), 4: (2, 3, 1, 3, 2)}[dist.get_world_size()]
    for (stage, precision), target in zip(SAVED, targets, strict=True):
        url = saved_in(stage, precision)
        engine = make_engine(target, precision[:4], seed=9)
        attach(engine, url)
        path, loaded = engine.load_checkpoint("unused", tag=f"first of {stage}")
        assert path == f"file://{url}/global_step3", path
        assert (loaded["epoch"], loaded["history"]) == (3, [0.5, 0])
        np.testing.assert_array_equal(loaded["array"], np.arange(5))
        assert torch.equal(loaded["tensor"], torch.zeros(2, dtype=torch.int64))
        stored = stored_state(url)
        del stored["model.head.weight"]
        require_same(whole_state(engine), stored)
        weights = model_weights(engine)
        require_same(weights, {name: stored[name] for name in weights})
        assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 2)
        groups = ckpt.load(url, group=None)["optimizer"]["groups"]
        assert [(g["weight_decay"], g["lr"]) for g in engine.optimizer.param_groups] == [
            (group["weight_decay"], group["lr"]) for group in groups.values()
        ]
        assert np.isfinite(train_step(engine, 3))


def train_during_saves() -> None:
    """The next step begins when a save returns, and the save has the state from before, whatever of it is copied later."""
    for stage, precision in ((0, "fp32"), (2, "bf16"), (3, "bf16"), (1, "bf16-fp32-grads")):
        url = ROOT / f"during-{stage}-{precision}"
        engine = trained_engine(stage, precision, hidden=130_000)  # small leaves are copied before the save returns
        attached = attach(engine, url)
        for step in (3, 4):
            expected = whole_state(engine)
            with failing("save.stage=sleep:0.1@*"):
                engine.save_checkpoint("unused")
                assert not attached.last_save.staged.is_set()
                train_step(engine, step)
                assert attached.last_save.staged.is_set()
            attached.last_save.result()
            stored = stored_state(url)
            del stored["model.head.weight"]
            require_same(stored, expected)
            dist.barrier()
        with failing("save.stage=sleep:0.1@*"):  # a load waits, too
            expected = whole_state(engine)
            engine.save_checkpoint("unused")
            engine.load_checkpoint("unused", tag="global_step4")
        attached.close()
        stored = stored_state(url)
        del stored["model.head.weight"]
        require_same(stored, expected)

        attached = attach(engine, ROOT / f"at-once-{stage}-{precision}", defer=False)
        with failing("save.stage=sleep:0.1@*"):
            engine.save_checkpoint("unused")
            assert attached.last_save.staged.is_set()
        attached.close()


def copy_at_once_with_muon() -> None:
    """DeepSpeed changes the moment of Muon in the backward, so that it can't be copied later."""
    import deepspeed

    if not hasattr(deepspeed.runtime.engine, "MUON_OPTIMIZER"):
        return
    made = Model(hidden=130_000)
    options = config(1, "bf16", 1, dist.get_world_size(), reduce_scatter=False)
    options["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2}}
    trained = [p for p in made.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=made, model_parameters=trained, config=options)
    attached = attach(engine, ROOT / "muon")
    with failing("save.stage=sleep:0.1@*"):
        engine.save_checkpoint("unused")
        assert attached.last_save.staged.is_set()
    attached.close()


def refuse_other_models() -> None:
    """A model with another shape, with more or with fewer parameters is refused on all ranks, and nothing changes."""
    for stage, precision in ((1, "fp32"), (3, "bf16")):
        url = saved_in(stage, precision)
        for model, message in (
            ({"hidden": 14}, "has shape"),
            ({"more": True}, "lacks model.more.weight, model.more.bias"),
            ({"fewer": True}, "also has model.second.weight, model.second.bias"),
        ):
            engine = trained_engine(stage, precision, 1, seed=4, **model)
            attach(engine, url)
            before, steps = whole_state(engine), engine.global_steps
            with pytest.raises(ckpt.LeafMismatch, match=message):
                engine.load_checkpoint("unused")
            require_same(whole_state(engine), before)
            assert engine.global_steps == steps
            if "more" in model:  # as with DeepSpeed, the common parameters can be loaded
                engine.load_checkpoint("unused", load_module_strict=False)
                found, stored = whole_state(engine), stored_state(url)
                require_same({n: v for n, v in found.items() if n in stored and "more" not in n},
                             {n: v for n, v in stored.items() if n != "model.head.weight"})  # fmt: skip
                assert torch.equal(found["model.more.weight"], before["model.more.weight"])


def refuse_engines() -> None:
    """An engine, or a partitioned module, as an entry of a state would be saved or loaded in part, so it is refused."""
    engine = make_engine(3, "bf16")
    whole = make_engine(1)
    for state in ({"model": engine}, {"model": engine.module}, {"model": whole}, ModelState(engine.module)):
        with pytest.raises(ckpt.UnsupportedLeaf, match=r"EngineState\(engine\)"):
            ckpt.save(state, ROOT / "refused", 1, group=None)
    for engine, message in ((make_engine(0, "fp16"), "set stage 1, 2 or 3"), (experts(), "experts of DeepSpeed")):
        with pytest.raises(ckpt.InvalidArgument, match=message):
            attach(engine, ROOT / "refused")


def experts() -> Any:
    """Return an engine that reports experts but has none, because running them requires compiled operators."""
    engine = make_engine(1)
    engine.has_moe_layers = True
    return engine


def load_parts() -> None:
    """The options of load_checkpoint and save_checkpoint."""
    url = saved_in(2, "bf16")
    stored = stored_state(url)
    engine = trained_engine(3, "bf16", 1, seed=4)
    attached = attach(engine, url)
    before = whole_state(engine)
    engine.load_checkpoint("unused", load_module_only=True)
    found = whole_state(engine)
    for name, value in found.items():
        assert torch.equal(value, stored[name] if name.startswith("model") else before[name]), name
    assert engine.global_steps == 1
    engine.load_checkpoint("unused", load_optimizer_states=False, load_lr_scheduler_states=False)
    assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 0)
    for message, call in {
        "save_latest": lambda: engine.save_checkpoint("unused", save_latest=False),
        "custom_load_fn": lambda: engine.load_checkpoint("unused", custom_load_fn=print),
    }.items():
        with pytest.raises(ckpt.InvalidArgument, match=message):
            call()
    with pytest.raises(ckpt.StepNotFound, match="no step of .* has the tag 'epoch7'"):
        engine.load_checkpoint("unused", tag="epoch7")
    attached.close()

    engine = trained_engine(2, "bf16", 1)
    attached = attach(engine)  # the folder that the script names is the repository
    engine.save_checkpoint(ROOT / "unfrozen", exclude_frozen_parameters=True)
    attached.last_save.wait()
    assert "scale" not in ckpt.load(ROOT / "unfrozen", group=None)["model"]
    expected = whole_state(engine)
    train_step(engine, 1)
    engine.module.scale.data.fill_(7)
    assert engine.load_checkpoint(ROOT / "unfrozen")[0] == f"file://{ROOT}/unfrozen/global_step1"
    require_same(whole_state(engine), expected | {"model.scale": torch.full((1,), 7.0)})
    attached.close()


def load_folder_of_deepspeed() -> None:
    """A folder that DeepSpeed has saved is loaded by DeepSpeed, and the next save is ckpt's."""
    engine = trained_engine(1, "bf16", 2)
    expected = whole_state(engine)
    engine.save_checkpoint(str(ROOT / "own"), client_state={"epoch": 4})
    engine = make_engine(1, "bf16", seed=9)
    attached = attach(engine, ROOT / "moved")
    path, loaded = engine.load_checkpoint(str(ROOT / "own"))
    assert path.endswith("mp_rank_00_model_states.pt"), path
    assert loaded["epoch"] == 4
    require_same(whole_state(engine), expected)
    engine.save_checkpoint(str(ROOT / "own"))
    attached.close()
    stored = stored_state(ROOT / "moved")
    del stored["model.head.weight"]
    require_same(stored, expected)
    engine = make_engine(1, "bf16", seed=9)  # the next start of the same script
    attached = attach(engine, ROOT / "moved")
    assert engine.load_checkpoint(str(ROOT / "own"))[0] == f"file://{ROOT}/moved/global_step2"
    require_same(whole_state(engine), expected)
    path, _ = engine.load_checkpoint(str(ROOT / "own"), load_module_only=True)
    assert path.endswith("mp_rank_00_model_states.pt"), path
    attached.close()


OWN = {
    "stage1": (1, "fp32", {}), "stage2": (2, "bf16", {}), "stage3": (3, "bf16", {}), "bf16": (1, "bf16-fp32-grads", {}),
    "round-robin": (2, "bf16", {"round_robin_gradients": True}),
}  # fmt: skip
"""Folders that DeepSpeed saves: stage, precision and further options of zero_optimization."""


def save_own_folders() -> None:
    """Save with DeepSpeed itself, with the whole state beside it."""
    for name, (stage, precision, zero) in OWN.items():
        engine = trained_engine(stage, precision, zero=zero)
        engine.save_checkpoint(str(ROOT / "own" / name), client_state={"epoch": 4, "order": torch.arange(3)})
        expected = whole_state(engine) if name != "round-robin" else model_weights(engine)
        if dist.get_rank() == 0:
            torch.save(expected, ROOT / "own" / f"{name}.pt")


def load_imported() -> None:
    """An engine of another stage continues from a step that ckpt-import has made."""
    imported = [("stage1", "fp32", 3), ("stage3", "bf16", 2)]
    for name, precision, target in [*imported, *[("universal3", "bf16", 1)] * converts_groups_of_stage_3()]:
        engine = make_engine(target, precision, seed=9)
        attached = attach(engine, ROOT / f"imported-{name}")
        path, loaded = engine.load_checkpoint("unused", tag="global_step3")
        assert path is not None
        assert (loaded["epoch"], loaded["order"].tolist()) == (4, [0, 1, 2])
        require_same(whole_state(engine), torch.load(ROOT / "own" / f"{name}.pt"))
        assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 2)
        assert np.isfinite(train_step(engine, 3))
        engine.save_checkpoint("unused")
        attached.close()


def load_offloaded() -> None:
    """Optimizers that are offloaded to the CPU, and the order in which round_robin_gradients lays parameters out."""
    for stage, zero in ((2, OFFLOAD), (3, OFFLOAD), (2, {"round_robin_gradients": True})):
        url = ROOT / f"offloaded-{stage}-{len(zero)}-{next(iter(zero))}"
        engine = trained_engine(stage, "bf16", zero=zero)
        attached = attach(engine, url)
        engine.save_checkpoint("unused")
        attached.close()
        stored, weights = stored_state(url), model_weights(engine)
        for name, value in weights.items():
            assert torch.equal(stored[name].to(value.dtype), value), name
        for target, options in ((5 - stage, zero), (1, {})):
            loaded = make_engine(
                target, "bf16", seed=9, zero={k: v for k, v in options.items() if k != "round_robin_gradients"}
            )
            attach(loaded, url)
            loaded.load_checkpoint("unused")
            require_same(model_weights(loaded), weights)
            expected = {name: value for name, value in stored.items() if name != "model.head.weight"}
            require_same(whole_state(loaded), expected)
            assert np.isfinite(train_step(loaded, 3))


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def exchange_with_torch() -> None:
    """A model of torch alone loads a step of ZeRO stage 1, and an engine loads what it saves."""
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.AdamW(parameter_groups(model))
    ckpt.load(saved_in(1, "fp32"), like=ModelState(model, optimizer), group=None)
    stored = stored_state(saved_in(1, "fp32"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[f"model.{name}"])
        for key in MOMENTS if parameter.requires_grad else ():
            assert torch.equal(optimizer.state[parameter][key], stored[f"optimizer.state.{name}.{key}"])
    if dist.get_rank() == 0:
        ckpt.save(ModelState(model, optimizer), ROOT / "torch", 1, group=None)
    dist.barrier()
    engine = make_engine(2, seed=9)
    ckpt.load(ROOT / "torch", like=EngineState(engine))
    del stored["model.head.weight"]
    require_same(whole_state(engine), stored)


if __name__ == "__main__":
    run_checks(globals())
