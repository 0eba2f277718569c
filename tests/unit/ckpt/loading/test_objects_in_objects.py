"""Objects whose state_dict() has other objects: schedulers in schedulers, random generators, modules."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ckpt


class Keeper:
    """Returns its attributes as its state, and takes them back as they are, as a scheduler of torch does."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Named(NamedTuple):
    count: int
    item: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    item: Any
    count: int = 0


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that another one follows, with the state_dict() of torch, as in the package pytorch-gradual-warmup-lr."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch < 3:
            return [base * (self.last_epoch + 1) / 3 for base in self.base_lrs]
        self.after.step()
        return list(self.after.get_last_lr())


def warmed_up() -> tuple[torch.optim.Optimizer, Warmup]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    return optimizer, Warmup(optimizer)


def test_a_scheduler_in_a_scheduler_continues_as_it_would_have(tmp_path: Path) -> None:
    optimizer, schedule = warmed_up()
    for _ in range(5):
        schedule.step()
    ckpt.save({"optimizer": optimizer, "schedule": schedule}, tmp_path / "r")
    resumed_optimizer, resumed = warmed_up()
    after = resumed.after
    ckpt.load(tmp_path / "r", {"optimizer": resumed_optimizer, "schedule": resumed})
    assert resumed.after is after
    for _ in range(3):
        schedule.step()
        resumed.step()
        assert resumed.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize("within", [lambda g: g, lambda g: [1, g], lambda g: (g, 2), lambda g: {"a": {"b": g}}])
@pytest.mark.parametrize("make", [np.random.default_rng, random.Random], ids=["numpy", "python"])
def test_a_generator_in_the_state_of_an_object_is_a_generator_again(tmp_path: Path, make: Any, within: Any) -> None:
    generator, other = make(1), make(2)
    ckpt.save({"sampler": Keeper(rng=within(generator))}, tmp_path / "r")
    resumed = Keeper(rng=within(other))
    ckpt.load(tmp_path / "r", {"sampler": resumed})
    assert type(resumed.rng) is type(within(other))
    assert other.random() == generator.random()


def test_the_global_generators_in_the_state_of_an_object_are_set(tmp_path: Path) -> None:
    ckpt.save({"sampler": Keeper(random=ckpt.RandomState())}, tmp_path / "r")
    expected = random.random(), np.random.random(), torch.rand(1)
    ckpt.load(tmp_path / "r", {"sampler": Keeper(random=ckpt.RandomState())})
    assert (random.random(), np.random.random(), torch.rand(1)) == expected


def test_a_module_in_the_state_of_an_object_is_filled_in_place(tmp_path: Path) -> None:
    saved, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    ckpt.save({"trainer": Keeper(model=saved, step=3)}, tmp_path / "r")
    weight, resumed = model.weight, Keeper(model=model, step=0)
    ckpt.load(tmp_path / "r", {"trainer": resumed})
    assert resumed.model is model
    assert model.weight is weight
    assert torch.equal(weight, saved.weight)
    assert resumed.step == 3


def test_an_object_that_this_run_lacks_is_loaded_as_its_state(tmp_path: Path) -> None:
    ckpt.save({"trainer": Keeper(inner=Keeper(a=1), others=[Keeper(b=2)])}, tmp_path / "r")
    resumed = Keeper(inner=None, others=[])
    ckpt.load(tmp_path / "r", {"trainer": resumed})
    assert resumed.inner == {"a": 1}
    assert resumed.others == [{"b": 2}]


def test_a_part_of_an_inner_object_is_loaded_alone(tmp_path: Path) -> None:
    ckpt.save({"trainer": Keeper(inner=Keeper(a=1, b=2), c=3)}, tmp_path / "r")
    resumed = Keeper(inner=Keeper(a=0, b=0), c=0)
    ckpt.load(tmp_path / "r", {"trainer": resumed}, only="trainer.inner.b")
    assert vars(resumed.inner) == {"a": 0, "b": 2}
    assert resumed.c == 0


class Owner:
    """Its state has its item itself, so its setter has nothing to do."""

    def __init__(self, wrap: Any, item: Any) -> None:
        self.wrap, self.item = wrap, item

    def state_dict(self) -> Any:
        return {"item": self.wrap(self.item)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["item"]) in (Keeper, Named, Frozen, tuple)


@pytest.mark.parametrize(
    "wrap",
    [
        ckpt.PerRank, lambda x: ckpt.PerRank((1, x)), lambda x: Named(3, ckpt.PerRank(x)), lambda x: Named(3, x), Frozen,
        lambda x: Frozen(Named(3, (1, x))),
    ],
    ids=["PerRank", "PerRank of a tuple", "PerRank in a namedtuple", "namedtuple", "dataclass", "nested"],
)  # fmt: skip
def test_an_object_in_any_container_of_a_state_is_filled_in_place(tmp_path: Path, wrap: Any) -> None:
    ckpt.save({"owner": Owner(wrap, Keeper(a=1, b=[np.ones(2)]))}, tmp_path / "r")
    item = Keeper(a=0, b=[np.zeros(2)])
    ckpt.load(tmp_path / "r", {"owner": Owner(wrap, item)})
    assert item.a == 1
    assert item.b[0].tolist() == [1, 1]


@pytest.mark.parametrize("wrap", [Named, Frozen])
def test_a_container_of_another_length_is_loaded_as_it_was_saved(tmp_path: Path, wrap: Any) -> None:
    ckpt.save({"owner": Keeper(item=(1, wrap(Keeper(a=1), 2)))}, tmp_path / "r")
    for other in ((), (0, 0), (0, (0, 0))):
        resumed = Keeper(item=other)
        ckpt.load(tmp_path / "r", {"owner": resumed})
        assert resumed.item == (1, wrap({"a": 1}, 2))


def test_values_of_each_rank_may_have_another_shape_than_before(tmp_path: Path) -> None:
    ckpt.save({"reader": Keeper(window=ckpt.PerRank(np.arange(3)), position=1)}, tmp_path / "r")
    resumed = Keeper(window=ckpt.PerRank(np.arange(5)), position=0)
    ckpt.load(tmp_path / "r", {"reader": resumed})
    assert resumed.window.tolist() == [0, 1, 2]


def test_values_of_each_rank_that_are_not_selected_stay(tmp_path: Path) -> None:
    ckpt.save({"reader": Keeper(window=ckpt.PerRank({"a": 1, "b": 1}), own=ckpt.PerRank(3), position=1)}, tmp_path / "r")
    resumed = Keeper(window=ckpt.PerRank({"a": 0, "b": 0}), own=ckpt.PerRank(4), position=0)
    ckpt.load(tmp_path / "r", {"reader": resumed}, only=["reader.window.a", "reader.position"])
    assert vars(resumed) == {"window": {"a": 1, "b": 0}, "own": 4, "position": 1}


@pytest.mark.parametrize("wrap", [lambda x: Named(3, x), lambda x: Frozen((1, x), 2)], ids=["namedtuple", "dataclass"])
def test_values_in_any_container_of_a_state_can_be_renamed(tmp_path: Path, wrap: Any) -> None:
    ckpt.save({"owner": Keeper(old=wrap([1, np.ones(2)]))}, tmp_path / "r")
    resumed = Keeper(new=wrap([0, np.zeros(2)]))
    ckpt.load(tmp_path / "r", {"owner": resumed}, rename={"owner.new": "owner.old"})
    assert repr(resumed.new) == repr(wrap([1, np.ones(2)]))
