"""Names of the entries of a module and of an optimizer, with and without the wrappers of torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.torch_launches import torch, trained
from programs import torch_models

import ckpt
from ckpt.adapters.torch import ModelState

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux has them"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def test_wrappers_do_not_change_the_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, optimizer = trained()
    model["layer1"] = checkpoint_wrapper(model["layer1"])
    model["layer2"] = torch.compile(model["layer2"])  # never called, so nothing is compiled
    ckpt.save(ModelState(model, optimizer), tmp_path)
    plain, fresh = torch_models.sharded("plain")
    ckpt.load(tmp_path, ModelState(plain, fresh))
    reference = torch_models.everything(*trained())
    torch_models.same(torch_models.everything(plain, fresh), reference, "wrapped into plain")


def test_an_optimizer_without_state_is_restored_without_state(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    state = {"train": ModelState(model, optimizer)}
    ckpt.save(state, tmp_path)
    assert not optimizer.state
    torch_models.train(model, optimizer)
    torch_models.same(torch_models.everything(model, optimizer), torch_models.everything(*trained()), "after a save")
    ckpt.load(tmp_path, state)
    assert not optimizer.state
    torch_models.train(model, optimizer)
    assert torch.equal(model["layer0"].up.weight, trained()[0]["layer0"].up.weight)


def test_the_states_of_two_optimizers_load_into_one_by_name(tmp_path: Path) -> None:
    model, _ = trained()
    first = torch.optim.SGD(model["layer0"].parameters(), lr=0.5, momentum=0.9)
    rest = torch.optim.SGD([p for i in (1, 2, 3) for p in model[f"layer{i}"].parameters()], lr=0.5, momentum=0.9)
    model["layer3"].norm.bias.requires_grad_(False)  # a parameter without state
    torch_models.forward(model, torch.ones(2, torch_models.WIDTH)).sum().backward()
    first.step()
    rest.step()
    ckpt.save({"train": ModelState(model, [first, rest])}, tmp_path)
    other = torch_models.make_model(seed=1)
    one = torch.optim.SGD(list(other.parameters())[::-1], lr=9.0, momentum=0.1)
    ckpt.load(tmp_path, {"train": ModelState(other, one)})
    assert (one.param_groups[0]["lr"], one.param_groups[0]["momentum"]) == (0.5, 0.9)
    names = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, names[name])
        entries = (first.state | rest.state).get(names[name], {})
        assert one.state.get(parameter, {}).keys() == entries.keys(), name
        assert all(torch.equal(one.state[parameter][key], entries[key]) for key in entries)
    first.param_groups[0]["lr"] = 0.25
    ckpt.save({"train": ModelState(model, [first, rest])}, tmp_path)
    with pytest.raises(ckpt.LeafMismatch, match="were saved with different options"):
        ckpt.load(tmp_path, {"train": ModelState(other, one)})


def test_moments_of_a_wider_type_than_the_parameters_keep_it(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 3).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters())
    for parameter in layer.parameters():
        wide = torch.randn(parameter.shape)
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": wide, "exp_avg_sq": wide.square()}
    ckpt.save(ModelState(layer, optimizer), tmp_path)
    other = torch.nn.Linear(3, 3).to(torch.bfloat16)
    fresh = torch.optim.AdamW(other.parameters())
    ckpt.load(tmp_path, ModelState(other, fresh))
    assert fresh.state[other.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[layer.weight]["exp_avg"])


def test_a_part_is_loaded_and_a_missing_leaf_is_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    ckpt.save({"train": ModelState(model, optimizer)}, tmp_path)
    other, fresh = torch_models.sharded("plain")
    ckpt.load(tmp_path, {"train": ModelState(other, fresh)}, only="train.model.layer1")
    assert not fresh.state
    assert torch.equal(other["layer1"].up.weight, model["layer1"].up.weight)
    assert not torch.equal(other["layer2"].up.weight, model["layer2"].up.weight)
    other["new"] = torch.nn.Linear(2, 2)
    before = torch_models.everything(other, fresh)
    with pytest.raises(ckpt.LeafNotFound, match=r"leaf train.model.new.weight of `like` is not in step 0"):
        ckpt.load(tmp_path, {"train": ModelState(other, fresh)})
    torch_models.same(torch_models.everything(other, fresh), before, "a refused load")
    with pytest.raises(ckpt.InvalidArgument, match="none of the model's"):
        ckpt.save(ModelState(other, torch.optim.SGD(model.parameters())), tmp_path)


@pytest.mark.parametrize("nested", [False, True], ids=["SWALR", "in a SequentialLR"])
def test_the_scheduler_of_weight_averaging_continues(tmp_path: Path, nested: bool) -> None:
    """Older versions of SWALR have a function in their state, and all take the strategy from the constructor."""
    from torch.optim.lr_scheduler import ConstantLR, SequentialLR
    from torch.optim.swa_utils import SWALR

    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.8)
        averaging = SWALR(optimizer, swa_lr=0.1, anneal_epochs=6, anneal_strategy="linear")
        return optimizer, SequentialLR(optimizer, [ConstantLR(optimizer), averaging], [1]) if nested else averaging

    def steps(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, schedule = make()
    steps(optimizer, schedule, 3)
    ckpt.save({"optimizer": optimizer, "schedule": schedule}, tmp_path, 1)
    expected = steps(optimizer, schedule, 4)
    assert len(set(expected)) > 2
    optimizer, schedule = make()
    ckpt.load(tmp_path, like={"optimizer": optimizer, "schedule": schedule})
    assert steps(optimizer, schedule, 4) == expected


class KeepsWideState(torch.optim.Optimizer):
    """An optimizer with state of other types and shapes than its parameters, some of it nested."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "master": parameter.detach().float() + 1e-5, "count": torch.tensor(2**24 + 1), "mask": parameter > 0,
                    "rows": torch.full(parameter.shape[:1], 1.0 + 1e-5), "step": torch.tensor(1.0),
                    "nested": {"first": torch.full_like(parameter, 1.0 + 1e-5, dtype=torch.float32)},
                    "several": [torch.tensor([1.0 + 1e-9], dtype=torch.float64)],
                }  # fmt: skip
            self.state[parameter]["count"] += 1


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, (dict, list, tuple)):
        return [leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in leaves_of(each)]
    return [value]


@pytest.mark.parametrize("with_names", [False, True], ids=["plain", "ModelState"])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, KeepsWideState])
@pytest.mark.parametrize("has_state", [False, True], ids=["new", "used"])
def test_state_of_other_types_than_the_parameters_is_loaded_as_saved(
    tmp_path: Path, kind: Any, with_names: bool, has_state: bool
) -> None:
    def made(steps: int) -> tuple[Any, Any]:
        model = torch.nn.Linear(3, 2).bfloat16()
        optimizer = kind(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        state = {"train": ModelState(model, optimizer)} if with_names else {"model": model, "optimizer": optimizer}
        return optimizer, state

    saved, state = made(3)
    ckpt.save(state, tmp_path, 1)
    loaded, target = made(int(has_state))
    ckpt.load(tmp_path, like=target)
    pairs = list(zip(leaves_of(saved.state_dict()["state"]), leaves_of(loaded.state_dict()["state"]), strict=True))
    assert len(pairs) > 2
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_load_keeps_what_hooks_of_an_optimizer_change(tmp_path: Path, when: str) -> None:
    def made() -> Any:
        return KeepsWideState([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])

    def set_master(state: Any) -> dict[str, Any]:
        entries = {number: {**entry, "master": torch.full((3,), 7.0)} for number, entry in state["state"].items()}
        return {**state, "state": entries}

    def set_half_master(optimizer: Any) -> None:
        for entry in optimizer.state.values():
            entry["master"] = torch.full((3,), 5.0, dtype=torch.bfloat16)

    optimizer = made()
    optimizer.step()
    ckpt.save({"optimizer": optimizer}, tmp_path, 1)
    fresh = made()
    if when == "before":
        fresh.register_load_state_dict_pre_hook(lambda _, state: set_master(state))
        expected = torch.full((3,), 7.0)
    else:
        fresh.register_load_state_dict_post_hook(set_half_master)
        expected = torch.full((3,), 5.0, dtype=torch.bfloat16)
    ckpt.load(tmp_path, like={"optimizer": fresh})
    entry = fresh.state_dict()["state"][0]
    assert entry["master"].dtype == expected.dtype
    assert torch.equal(entry["master"], expected)
    assert torch.equal(entry["rows"], torch.full((3,), 1.0 + 1e-5))  # as saved, in fp32
