"""Modules and layer states of equinox, states of optax, and iterators of grain are taken without a wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.messages import one_line
from helpers.rank_threads import all_well, on_ranks

import ckpt


class Model(eqx.Module):
    layers: list[Any]
    norm: eqx.nn.BatchNorm
    scale: jax.Array
    rate: float = eqx.field(static=True)

    def __init__(self, seed: int, rate: float = 0.5, width: int = 3) -> None:
        keys = jax.random.split(jax.random.key(seed))
        mlp = eqx.nn.MLP(width, 3, 4, 1, activation=jax.nn.gelu, key=keys[0])
        self.layers = [eqx.nn.Linear(3, width, key=keys[1]), jax.nn.relu, jnp.ravel, mlp, eqx.nn.Lambda(jnp.tanh)]
        self.norm, self.scale, self.rate = eqx.nn.BatchNorm(3, "batch", mode="ema"), jnp.full(2, float(seed)), rate


def arrays(tree: Any) -> list[Any]:
    return [leaf.tolist() for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def test_a_module_is_new_and_has_the_functions_and_static_fields_of_like(tmp_path: Path, caplog: Any) -> None:
    made, _ = eqx.nn.make_with_state(Model)(0)
    ckpt.save({"model": made}, tmp_path, 1)
    like, _ = eqx.nn.make_with_state(Model)(1, rate=0.25)
    loaded = ckpt.load(tmp_path, {"model": like})["model"]
    assert type(loaded) is Model
    assert loaded is not like
    assert like.scale.tolist() == [1, 1]
    assert arrays(loaded) == arrays(made)
    assert loaded.rate == 0.25
    assert "leaf model.rate: `like` has 0.25" in caplog.text
    assert loaded.layers[1] is jax.nn.relu
    assert loaded.layers[4].fn is jnp.tanh
    assert jax.tree.structure(loaded) == jax.tree.structure(like)
    assert "model.layers.3.layers.0.weight" in ckpt.open(tmp_path)[1].manifest().by_leaf()


def test_a_module_of_another_form_is_refused_by_name(tmp_path: Path) -> None:
    def sequence(*layers: Any) -> eqx.nn.Sequential:
        return eqx.nn.Sequential([eqx.nn.Lambda(layer) if layer is jnp.tanh else layer for layer in layers])

    def linear(width: int) -> eqx.nn.Linear:
        return eqx.nn.Linear(3, width, key=jax.random.key(0))

    ckpt.save({"model": sequence(linear(3), jnp.tanh, linear(2))}, tmp_path, 1)
    with pytest.raises(ckpt.LeafMismatch) as error:
        ckpt.load(tmp_path, {"model": sequence(linear(4), jnp.tanh, linear(2))})
    one_line(error, "leaf model.layers.0.weight", "shape [3, 3], `like` has [4, 3]")
    with pytest.raises(ckpt.LeafMismatch, match="leaf model.layers: step 1 of .* has 3 entries, `like` has 2"):
        ckpt.load(tmp_path, {"model": sequence(linear(3), jnp.tanh)})
    with pytest.raises(ckpt.LeafMismatch, match="leaf model.layers.1: step 1 of .* has a dataclass, `like` has"):
        ckpt.load(tmp_path, {"model": sequence(linear(3), linear(3), linear(2))})


def test_a_module_without_functions_keeps_its_stored_form(tmp_path: Path) -> None:
    """It was stored as a dataclass before equinox was known; such a step loads, and a load without `like` has all fields."""
    ckpt.save({"layer": eqx.nn.Linear(2, 3, key=jax.random.key(0))}, tmp_path, 1)
    loaded = ckpt.load(tmp_path)["layer"]
    assert (loaded.in_features, loaded.use_bias, loaded.weight.shape) == (2, True, (3, 2))


def test_an_object_that_is_no_function_is_refused_by_name(tmp_path: Path) -> None:
    class Counter:
        count = np.zeros(1)

        def __call__(self) -> None: ...

    class Holder(eqx.Module):
        counter: Any

    with pytest.raises(ckpt.UnsupportedLeaf, match="leaf model.counter: a .*Counter cannot be stored"):
        ckpt.save({"model": Holder(Counter())}, tmp_path, 1)


def test_a_layer_state_is_new_and_complete(tmp_path: Path) -> None:
    _, state = eqx.nn.make_with_state(Model)(0)
    moved = jax.tree.map(lambda x: (x + 1).astype(x.dtype), state)
    ckpt.save({"layers": moved}, tmp_path, 1)
    loaded = ckpt.load(tmp_path, {"layers": state})["layers"]
    assert type(loaded) is eqx.nn.State
    assert arrays(loaded) == arrays(moved) != arrays(state)
    _, other = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    with pytest.raises(ckpt.LeafMismatch, match="leaf layers"):
        ckpt.load(tmp_path, {"layers": other})
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"leaf layers: .*make it by equinox.nn.make_with_state"):
        ckpt.save({"layers": eqx.nn.State(eqx.nn.BatchNorm(3, "batch", mode="batch"))}, tmp_path, 2)


PARAMS = {"a": jnp.ones((2, 3)), "b": jnp.zeros(3)}
TRANSFORMATIONS = {
    "adam": optax.adam(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "lion": optax.lion(1e-3),
    "lbfgs": optax.lbfgs(),
    "muon": optax.contrib.muon(1e-3),
    "schedule_free": optax.contrib.schedule_free_adamw(),
    "noise": optax.add_noise(0.1, 0.1, jax.random.key(0)),
    "masked": optax.masked(optax.adam(1e-3), {"a": True, "b": False}),
    "multi_transform": optax.multi_transform({"x": optax.adam(1e-3), "y": optax.sgd(0.1, 0.9)}, {"a": "x", "b": "y"}),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1.0, 0.0, 10)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 4),
    "if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_states_of_optax_are_restored(tmp_path: Path, name: str) -> None:
    state: Any = TRANSFORMATIONS[name].init(PARAMS)
    ckpt.save({"opt": state}, tmp_path, 1)

    def is_key(x: Any) -> bool:
        return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))

    like = jax.tree.map(lambda x: jax.random.key(9) if is_key(x) else jnp.zeros_like(x), state)
    loaded = ckpt.load(tmp_path, {"opt": like})["opt"]
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert jnp.array_equal(*map(jax.random.key_data, (got, want))) if is_key(got) else jnp.array_equal(got, want)


class Numbers:
    def __len__(self) -> int:
        return 100

    def __repr__(self) -> str:  # grain compares it with that of the step
        return "Numbers()"

    def __getitem__(self, index: Any) -> int:
        return int(index)


def loader(workers: int) -> Any:
    sampler = grain.samplers.IndexSampler(100, grain.sharding.NoSharding(), shuffle=True, seed=3)
    return iter(grain.DataLoader(data_source=Numbers(), sampler=sampler, worker_count=workers))


def dataset(steps: Any = lambda d: d.batch(4)) -> Any:
    return iter(steps(grain.MapDataset.source(range(100)).shuffle(seed=1).repeat(2).to_iter_dataset()))


@pytest.mark.parametrize("make", [dataset, lambda: dataset(lambda d: d.filter(lambda x: x % 3).batch(3)), lambda: loader(0)])
def test_an_iterator_of_grain_continues_where_it_was(tmp_path: Path, make: Any) -> None:
    data, like = make(), make()
    for _ in range(7):
        next(data)
    ckpt.save({"data": data}, tmp_path, 1)
    want = [np.asarray(next(data)).tolist() for _ in range(9)]
    next(like)
    assert ckpt.load(tmp_path, {"data": like})["data"] is like
    assert [np.asarray(next(like)).tolist() for _ in range(9)] == want


def test_a_data_set_of_grain_is_refused_with_what_to_store(tmp_path: Path) -> None:
    with pytest.raises(ckpt.UnsupportedLeaf) as error:
        ckpt.save({"data": grain.MapDataset.source(range(3))}, tmp_path, 1)
    one_line(error, "leaf data", "store its iterator")


def test_each_rank_has_its_own_iterator(tmp_path: Path) -> None:
    def iterator(group: Any) -> Any:
        return iter(grain.MapDataset.source(range(20))[group.rank :: 2].to_iter_dataset())

    def save(group: Any) -> None:
        data = iterator(group)
        for _ in range(2 + group.rank):
            next(data)
        ckpt.save({"data": data}, tmp_path, 1, group=group)

    def load(group: Any) -> int:
        return int(next(ckpt.load(tmp_path, {"data": iterator(group)}, group=group)["data"]))

    all_well(on_ranks(2, save))
    assert all_well(on_ranks(2, load)) == [4, 7]
