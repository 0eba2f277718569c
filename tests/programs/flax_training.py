"""A training run with flax.nnx, flax.linen or equinox, optax and grain, which appends the bits of each loss to a file.

Usage:

    flax_training.py nnx|linen|equinox REPOSITORY RESULT STEPS
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import ckpt

Step = Callable[[dict[str, Any], Any], tuple[dict[str, Any], Any]]
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100)))


def samples() -> Iterator[Any]:
    """Return an endless iterator of batches in a random order."""
    values = np.random.default_rng(7).standard_normal((64, 5)).astype(np.float32)
    return iter(grain.MapDataset.source(values).shuffle(seed=3).repeat().to_iter_dataset().batch(8))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(4, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def nnx_training() -> tuple[dict[str, Any], Step]:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def update(model: Net, optimizer: nnx.Optimizer, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(batch[:, :4]) - batch[:, 4:]).mean())(model)
        optimizer.update(model, grads)
        return loss

    return {"model": model, "optimizer": optimizer}, lambda s, batch: (s, update(s["model"], s["optimizer"], batch))


def linen_training() -> tuple[dict[str, Any], Step]:
    model = nn.Sequential([nn.Dense(16), nn.relu, nn.Dropout(0.2, deterministic=False), nn.Dense(1)])
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.ones((8, 4)))["params"]

    @jax.jit
    def update(train: TrainState, key: Any, batch: Any) -> tuple[TrainState, Any, Any]:
        key, now = jax.random.split(key)

        def loss(params: Any) -> Any:
            return jnp.square(train.apply_fn({"params": params}, batch[:, :4], rngs={"dropout": now}) - batch[:, 4:]).mean()

        value, grads = jax.value_and_grad(loss)(train.params)
        return train.apply_gradients(grads=grads), key, value

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
        train, key, loss = update(state["train"], state["key"], batch)
        return {**state, "train": train, "key": key}, loss

    return {"train": TrainState.create(apply_fn=model.apply, params=params, tx=TX), "key": jax.random.key(2)}, step


class Model(eqx.Module):
    layers: list[Any]
    norm: eqx.nn.BatchNorm

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key)
        self.layers = [
            eqx.nn.Linear(4, 16, key=keys[0]),
            jax.nn.relu,
            eqx.nn.Dropout(0.2),
            eqx.nn.MLP(16, 1, 8, 1, key=keys[1]),
        ]
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")

    def __call__(self, x: Any, state: Any, key: Any) -> tuple[Any, Any]:
        x, state = self.norm(self.layers[0](x), state)
        return self.layers[3](self.layers[2](self.layers[1](x), key=key)), state


def equinox_training() -> tuple[dict[str, Any], Step]:
    model, layer_state = eqx.nn.make_with_state(Model)(jax.random.key(0))

    @eqx.filter_value_and_grad(has_aux=True)
    def loss_of(model: Model, layer_state: Any, keys: Any, batch: Any) -> tuple[Any, Any]:
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        out, layer_state = call(batch[:, :4], layer_state, keys)
        return jnp.square(out - batch[:, 4:]).mean(), layer_state

    @eqx.filter_jit
    def update(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
        key, now = jax.random.split(state["key"])
        (loss, layers), grads = loss_of(state["model"], state["layers"], jax.random.split(now, len(batch)), batch)
        updates, moments = TX.update(grads, state["moments"], eqx.filter(state["model"], eqx.is_array))
        model = eqx.apply_updates(state["model"], updates)
        return {"model": model, "layers": layers, "moments": moments, "key": key}, loss

    moments = TX.init(eqx.filter(model, eqx.is_array))
    return {"model": model, "layers": layer_state, "moments": moments, "key": jax.random.key(2)}, update


def main() -> None:
    kind, url, result, steps = sys.argv[1:]
    state, update = {"nnx": nnx_training, "linen": linen_training, "equinox": equinox_training}[kind]()
    data = samples()
    losses = Path(result).open("a", buffering=1)
    with ckpt.Checkpointer(url, every=5) as ck:
        (state, data), start = ck.restore((state, data))
        for step in range(start, int(steps)):
            state, loss = update(state, next(data))
            losses.write(f"{step} {float(loss).hex()}\n")
            ck.step(step, (state, data))


if __name__ == "__main__":
    main()
