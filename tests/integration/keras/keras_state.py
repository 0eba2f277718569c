"""Checks of Keras objects for one backend, which Keras chooses at its import: BACKEND FOLDER CHECK…"""

from __future__ import annotations

import os
import sys

os.environ["KERAS_BACKEND"] = sys.argv[1]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from pathlib import Path
from typing import Any

import keras
import numpy as np

import ckpt
from ckpt.errors import LeafMismatch, UnsupportedLeaf

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(32, 1)).astype("float32")


def make_model(seed: int, width: int = 8, optimizer: Any = "adam") -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((4,)), layers.Dense(width), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
    )
    if optimizer is not None:
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    return model


def trained(seed: int = 1, **options: Any) -> Any:
    model = make_model(seed, **options)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model


def bytes_of(model: Any) -> list[bytes]:
    return [to_numpy(v).tobytes() for v in [*model.variables, *getattr(getattr(model, "optimizer", None), "variables", [])]]


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(keras.ops.convert_to_numpy(value))


def loss_after(model: Any) -> list[float]:
    return model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]


def refused(call: Any, kind: type[Exception], text: str) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {text}")


def names(url: Path) -> None:
    for number in (1, 2):  # the second model has other automatic names
        ckpt.save({"model": trained()}, url, number)
    repository = ckpt.open(url)
    assert set(repository[1]) == set(repository[2])
    moments = [f"optimizer.layers.{layer}.{v}" for layer in ("dense", "dense_1") for v in ("kernel", "bias")]
    moments += [f"optimizer.layers.batch_normalization.{v}" for v in ("gamma", "beta")]
    variables = [f"layers.{layer}.{v}" for layer in ("dense", "dense_1") for v in ("kernel", "bias")]
    variables += [f"layers.batch_normalization.{v}" for v in ("gamma", "beta", "moving_mean", "moving_variance")]
    variables += ["layers.dropout.seed_generator.state", "optimizer.iterations", "optimizer.learning_rate"]
    variables += [f"{m}.{slot}" for m in moments for slot in ("momentum", "velocity")]
    assert set(repository[1]) == {f"model.{v}" for v in variables}, sorted(repository[1])


def fills(url: Path) -> None:
    saved, fresh = trained(), trained(2)
    ckpt.save({"model": saved}, url, 1)
    before = [id(v) for v in fresh.variables]
    assert bytes_of(fresh) != bytes_of(saved)
    assert ckpt.load(url, like={"model": fresh})["model"] is fresh
    assert [id(v) for v in fresh.variables] == before
    assert bytes_of(fresh) == bytes_of(saved)


def continues(url: Path) -> None:
    saved, fresh = trained(), trained(2)
    ckpt.save({"model": saved, "random": ckpt.RandomState()}, url, 1)  # on torch, dropout draws from the global generator
    want = loss_after(saved)
    ckpt.load(url, like={"model": fresh, "random": ckpt.RandomState()})
    assert loss_after(fresh) == want


def new_optimizer(url: Path) -> None:
    saved, fresh = trained(), make_model(2)
    ckpt.save({"model": saved}, url, 1)
    assert not fresh.optimizer.built
    ckpt.load(url, like={"model": fresh})
    assert bytes_of(fresh) == bytes_of(saved)


def uncompiled(url: Path) -> None:
    saved, fresh = trained(), make_model(2, optimizer=None)
    ckpt.save({"model": saved}, url, 1)
    ckpt.load(url, like={"model": fresh})
    assert bytes_of(fresh) == bytes_of(saved)[: len(fresh.variables)]


def other_structure(url: Path) -> None:
    ckpt.save({"model": trained()}, url, 1)
    wide, deep = trained(2, width=9), make_model(2)
    deep.add(keras.layers.Dense(1))
    flat = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8)])
    other = trained(2, optimizer="rmsprop")
    states = [bytes_of(m) for m in (wide, deep, flat, other)]
    refused(lambda: ckpt.load(url, like={"model": wide}), LeafMismatch, "shape")
    refused(lambda: ckpt.load(url, like={"model": deep}), LeafMismatch, "lacks layers.dense_2")
    refused(lambda: ckpt.load(url, like={"model": flat}), LeafMismatch, "has layers.batch_normalization")
    refused(lambda: ckpt.load(url, like={"model": other}), LeafMismatch, "momentum")
    deep_now = bytes_of(deep)[: len(states[1])]
    assert [bytes_of(wide), deep_now, bytes_of(flat), bytes_of(other)] == states


def unbuilt(url: Path) -> None:
    ckpt.save({"model": trained()}, url, 1)
    model = keras.Sequential([keras.layers.Dense(8)])
    refused(
        lambda: ckpt.load(url, like={"model": model}),
        LeafMismatch,
        "leaf model of `like` cannot be filled: the Sequential has no",
    )


def seeds(url: Path) -> None:
    generator = keras.random.SeedGenerator(5)
    generator.next()
    ckpt.save({"seed": generator}, url, 1)
    want = to_numpy(generator.next())
    fresh = keras.random.SeedGenerator(6)
    ckpt.load(url, like={"seed": fresh})
    assert (to_numpy(fresh.next()) == want).all()


def preprocessing(url: Path) -> None:
    layer, fresh = keras.layers.Normalization(), keras.layers.Normalization()
    layer.adapt(X)
    fresh.adapt(X * 3 + 1)
    ckpt.save({"layer": layer}, url, 1)
    ckpt.load(url, like={"layer": fresh})
    assert np.array_equal(keras.ops.convert_to_numpy(layer(X)), keras.ops.convert_to_numpy(fresh(X)))


@keras.saving.register_keras_serializable()
class Nested(keras.Model):
    """Layers in a list, in a dict, shared, and a variable and a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [keras.layers.Dense(4), [keras.layers.Dense(4), keras.layers.Dropout(0.1)]]
        self.heads = {"a": keras.layers.Dense(1), "b": keras.layers.Dense(1)}
        self.shared = self.blocks[0]
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.tracker = keras.metrics.Mean()
        self.loose = [self.add_weight(shape=(2,), initializer="ones")]

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.shared(self.blocks[1][1](self.blocks[1][0](self.blocks[0](x)), training=training))
        return self.heads["a"](x) + self.heads["b"](x) * self.scale + self.loose[0][0]


def shared_and_nested(url: Path) -> None:
    models = []
    for seed in (1, 2):
        keras.utils.set_random_seed(seed)
        model = Nested()
        model.compile(optimizer="adam", loss="mse")
        model.fit(X, Y, verbose=0, shuffle=False)
        models.append(model)
    ckpt.save({"model": models[0]}, url, 1)
    found = {name.removeprefix("model.") for name in ckpt.open(url)[1] if "optimizer" not in name}
    want = {
        f"{layer}.{v}" for layer in ("blocks.dense", "blocks.container.dense", "heads.a", "heads.b") for v in ("kernel", "bias")
    }
    found = {name.replace("tracked_list", "container").replace("list_wrapper", "container") for name in found}
    assert want <= found, sorted(found)
    assert "scale" in found, sorted(found)
    assert len(found) == len(models[0].variables)
    ckpt.load(url, like={"model": models[1]})
    assert bytes_of(models[0]) == bytes_of(models[1])


def low_precision(url: Path) -> None:
    def make(value: float) -> dict[str, Any]:
        return {
            d: keras.Variable(np.full((3,), value), dtype=d, trainable=False) for d in ("bfloat16", "float16", "int8", "bool")
        }

    saved, fresh = make(1), make(0)
    ckpt.save(saved, url, 1)
    ckpt.load(url, like=fresh)
    assert all(to_numpy(keras.ops.cast(v, "float32")).tolist() == [1, 1, 1] for v in fresh.values())


def random_state(url: Path) -> None:
    keras.utils.set_random_seed(3)
    keras.random.normal((2,))
    ckpt.save({"random": ckpt.RandomState()}, url, 1)
    want = to_numpy(keras.random.normal((2,))).tolist()
    keras.utils.set_random_seed(4)
    ckpt.load(url, like={"random": ckpt.RandomState()})
    assert to_numpy(keras.random.normal((2,))).tolist() == want


def symbolic(url: Path) -> None:
    refused(lambda: ckpt.save({"x": keras.Input((3,))}, url, 1), UnsupportedLeaf, "leaf x: a KerasTensor has no data")


def standalone_optimizer(url: Path) -> None:
    saved, fresh = trained(), trained(2)
    ckpt.save({"optimizer": saved.optimizer, "metric": saved.metrics[0]}, url, 1)
    assert "optimizer.parameters.0.momentum" in ckpt.open(url)[1]
    ckpt.load(url, like={"optimizer": fresh.optimizer, "metric": fresh.metrics[0]})
    assert bytes_of(fresh)[len(fresh.variables) :] == bytes_of(saved)[len(saved.variables) :]
    unbuilt_model = make_model(2)
    refused(
        lambda: ckpt.load(url, like={"optimizer": unbuilt_model.optimizer}), LeafMismatch, "build(model.trainable_variables)"
    )


def write(url: Path) -> None:
    model = trained()
    ckpt.save({"model": model}, url, 1)
    print([round(float(v), 5) for v in np.asarray(model.predict(X, verbose=0)).reshape(-1)[:5]])


def read(url: Path) -> None:
    model = make_model(2, optimizer=None)  # counters of optimizers have other types on other backends
    ckpt.load(url, like={"model": model})
    print([round(float(v), 5) for v in np.asarray(model.predict(X, verbose=0)).reshape(-1)[:5]])


if __name__ == "__main__":
    for check in sys.argv[3:]:
        alone = check in ("write", "read")
        globals()[check](Path(sys.argv[2]) / ("model" if alone else check))
        if not alone:
            print(check, flush=True)
