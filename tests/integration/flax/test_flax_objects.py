"""Modules, states, variables and optimizers of flax.nnx, and train states of flax.linen, are taken without a wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState
from helpers.messages import one_line

import ckpt

pytestmark = pytest.mark.essential


class Net(nnx.Module):
    def __init__(self, seed: int, layers: int = 2) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(layers)])
        self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.tied = self.layers[0].kernel
        self.empty, self.tree = nnx.Variable(None), nnx.Variable({"a": jnp.full(2, float(seed)), "b": [seed, jnp.ones(2)]})

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return self.dropout(self.norm(x))


def trained(seed: int, tx: optax.GradientTransformation | None = None) -> tuple[Net, nnx.Optimizer]:
    model = Net(seed)
    optimizer = nnx.Optimizer(model, tx or optax.adam(1e-2), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: jnp.square(m(jnp.ones((4, 3)))).sum())(model))
    return model, optimizer


def leaves(value: Any) -> list[Any]:
    """Return the arrays of a module or pytree on the host."""
    if isinstance(value, nnx.Module | nnx.Optimizer | nnx.Rngs):
        value = nnx.state(value, nnx.Not(nnx.Intermediate))
    plain = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(
        jax.tree.map(jnp.asarray, value))]  # fmt: skip
    return [x.tolist() for x in plain]


def test_a_module_and_its_optimizer_are_filled_in_place(tmp_path: Path) -> None:
    """Batch statistics, generators and moments belong to the state; what sow() left of a call does not."""
    model, optimizer = trained(0)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    like_model, like_optimizer = Net(5), nnx.Optimizer(Net(5), optax.adam(1e-2), wrt=nnx.Param)
    kernel = like_model.layers[0].kernel
    like = {"model": like_model, "optimizer": like_optimizer}
    loaded = ckpt.load(tmp_path, like)
    assert loaded["model"] is like_model
    assert loaded["optimizer"] is like_optimizer
    assert like_model.layers[0].kernel is like_model.tied is kernel
    assert leaves(like_model) == leaves(model)
    assert leaves(like_optimizer) == leaves(optimizer)
    assert like_model.tree["b"][0] == 0
    x = jnp.ones((4, 3))
    assert model(x).tolist() == like_model(x).tolist()  # the generators of dropout, too
    names = ckpt.open(tmp_path)[1].manifest().by_leaf()
    want = ("model.layers.0.kernel", "model.norm.mean", "model.dropout.rngs.key", "optimizer.opt_state.0.mu.layers.1.bias")
    assert set(want) <= set(names)
    assert not any("hidden" in name for name in names)
    assert sum(name.endswith("kernel") and name.startswith("model") for name in names) == 2  # a shared variable is stored once


def test_a_module_of_another_form_is_refused_by_name(tmp_path: Path) -> None:
    ckpt.save({"model": Net(0)}, tmp_path / "two", 1)
    ckpt.save({"model": Net(0, 3)}, tmp_path / "three", 1)
    like = Net(1)
    before = leaves(like)
    with pytest.raises(ckpt.LeafMismatch) as more:
        ckpt.load(tmp_path / "three", {"model": like})
    one_line(more, "leaf model of `like`", "the step also has layers.2, unlike the Net of `like`")
    with pytest.raises(ckpt.LeafMismatch) as less:
        ckpt.load(tmp_path / "two", {"model": Net(1, 3)})
    one_line(less, "leaf model of `like`", "the step lacks layers.2")
    assert leaves(like) == before
    ckpt.load(tmp_path / "three", {"model": like}, only=["model.layers.0", "model.layers.1"])
    assert like.layers[1].kernel[...].tolist() == Net(0, 3).layers[1].kernel[...].tolist()


def test_wrong_shapes_and_dtypes_of_a_module_are_refused(tmp_path: Path) -> None:
    ckpt.save({"model": nnx.Linear(3, 4, rngs=nnx.Rngs(0))}, tmp_path, 1)
    with pytest.raises(ckpt.LeafMismatch, match="leaf model.bias: .* shape"):
        ckpt.load(tmp_path, {"model": nnx.Linear(3, 5, rngs=nnx.Rngs(0))})
    with pytest.raises(ckpt.LeafMismatch, match="leaf model.bias: .* dtype float32"):
        ckpt.load(tmp_path, {"model": nnx.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))})


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    ckpt.save({"optimizer": trained(0)[1]}, tmp_path, 1)
    with pytest.raises(ckpt.CkptError, match="leaf optimizer of `like` cannot be filled: .*opt_state"):
        ckpt.load(tmp_path, {"optimizer": trained(0, optax.sgd(1e-2))[1]})
    with pytest.raises(ckpt.CkptError, match="leaf optimizer of `like` cannot be filled: .*opt_state"):
        ckpt.load(tmp_path, {"optimizer": trained(0, optax.chain(optax.clip(1.0), optax.adam(1e-2)))[1]})


def test_a_state_of_nnx_is_filled_and_its_module_is_not(tmp_path: Path) -> None:
    """`like` may be a part of what was saved, as with dicts; nnx.update then sets the module."""
    model, like_model = Net(0), Net(3)
    ckpt.save({"state": nnx.state(model)}, tmp_path, 1)
    state, before = nnx.state(like_model, nnx.Param), leaves(like_model)
    assert ckpt.load(tmp_path, {"state": state})["state"] is state
    assert leaves(like_model) == before
    nnx.update(like_model, state)
    assert leaves(nnx.state(like_model, nnx.Param)) == leaves(nnx.state(model, nnx.Param))
    graph, rest = nnx.split(like_model)
    loaded = ckpt.load(tmp_path, {"state": rest})["state"]
    assert leaves(nnx.merge(graph, loaded)) == leaves(model)


def test_generators_and_variables_are_filled_in_place(tmp_path: Path) -> None:
    rngs, variable = nnx.Rngs(7, dropout=8), nnx.BatchStat(jnp.arange(3.0))
    rngs.dropout()
    ckpt.save({"rngs": rngs, "variable": variable}, tmp_path, 1)
    like = {"rngs": nnx.Rngs(1, dropout=2), "variable": nnx.BatchStat(jnp.zeros(3))}
    assert ckpt.load(tmp_path, like)["rngs"] is like["rngs"]
    assert jnp.array_equal(jax.random.key_data(rngs.dropout()), jax.random.key_data(like["rngs"].dropout()))
    assert like["variable"][...].tolist() == [0, 1, 2]


def test_a_module_loads_without_like_as_dicts(tmp_path: Path) -> None:
    ckpt.save(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tmp_path, 1)
    loaded = ckpt.load(tmp_path)
    assert loaded["kernel"].shape == (2, 3)
    assert list(loaded) == ["bias", "kernel"]


def train_state(start: float) -> TrainState:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10)))
    return TrainState.create(apply_fn=nn.Dense(3).apply, params=freeze({"kernel": jnp.full((2, 3), start)}), tx=tx)


def test_a_train_state_is_loaded_with_the_functions_of_like(tmp_path: Path) -> None:
    """The step counter is an int at first, and an array after the first call of jit."""
    saved = jax.jit(lambda s: s.apply_gradients(grads=s.params))(train_state(1.0))
    ckpt.save({"train": saved}, tmp_path, 1)
    like = train_state(2.0)
    loaded = ckpt.load(tmp_path, {"train": like})["train"]
    assert type(loaded) is TrainState
    assert loaded is not like
    assert loaded.tx is like.tx
    assert loaded.apply_fn == like.apply_fn
    assert leaves(loaded) == leaves(saved)
    assert like.params["kernel"].tolist() == train_state(2.0).params["kernel"].tolist()
    assert isinstance(loaded.params, FrozenDict)
    assert loaded.step.weak_type == saved.step.weak_type
    assert jax.tree.structure(loaded) == jax.tree.structure(like)


def test_frozen_and_plain_dicts_load_from_each_other(tmp_path: Path) -> None:
    plain = {"params": {"a": jnp.ones(2)}, "stats": {"b": jnp.ones(3)}}
    ckpt.save({"variables": plain}, tmp_path / "plain", 1)
    ckpt.save({"variables": freeze(plain)}, tmp_path / "frozen", 1)
    for name in ("plain", "frozen"):
        zeros = freeze({"params": {"a": jnp.zeros(2)}})
        loaded = ckpt.load(tmp_path / name, {"variables": zeros})["variables"]
        assert isinstance(loaded, FrozenDict)
        assert list(loaded) == ["params"]
        assert loaded["params"]["a"].tolist() == [1, 1]
        assert ckpt.load(tmp_path / name, {"variables": {"params": {"a": jnp.zeros(2)}}})["variables"]["params"]["a"].sum() == 2
        assert type(ckpt.load(tmp_path / name)["variables"]) is dict


def test_what_has_no_arrays_is_refused_with_what_to_store(tmp_path: Path) -> None:
    for value, words in [
        (nn.Dense(3), ("leaf x: a flax.linen.linear:Dense", "variables that its init() returned")),
        (optax.adam(1e-3), ("leaf x.init", "a function is code", "the state that init() returned")),
        ([jax.nn.relu], ("leaf x.0", "a function is code")),
        (jax.ShapeDtypeStruct((2,), jnp.float32), ("leaf x", "no data")),
    ]:
        with pytest.raises(ckpt.UnsupportedLeaf) as error:
            ckpt.save({"x": value}, tmp_path, 1)
        one_line(error, *words)
