"""Trains a Keras model by fit: train.py URL LOG BACKEND KIND. LOG gets a line for each batch, URL.history the history."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["KERAS_BACKEND"] = sys.argv[3]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from ckpt.adapters.keras import Checkpoints

URL, LOG, _, KIND = sys.argv[1:]
BATCHES = {"several_steps": 16, "passes": 4}.get(KIND, 8)
EPOCHS = 6 if KIND == "passes" else int(os.environ.get("EPOCHS", "4"))
X = np.random.default_rng(0).normal(size=(max(BATCHES, 8) * 4 - 1, 4)).astype("float32")  # the last batch is smaller
Y = X.sum(axis=1, keepdims=True) + np.random.default_rng(1).normal(size=(len(X), 1)).astype("float32")


class Log(keras.callbacks.Callback):
    """Writes the losses; slow enough to be killed in the middle."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        values = [float(value).hex() for value in logs.values()]
        with open(LOG, "a") as file:
            file.write(f"{self.epoch * BATCHES + batch} {'/'.join(values)}\n")
        time.sleep(0.03)


class Subclassed(keras.Model):
    """A model with a training step of its own, a list of layers and a metric that it updates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x: Any, training: bool = False) -> Any:
        for block in self.blocks:
            x = block(x, training=training) if isinstance(block, keras.layers.Dropout) else block(x)
        return x


class TwoOptimizers(Subclassed):
    """A model whose own training step uses two optimizers, which are attributes, as adversarial networks have them."""

    def compile(self, optimizer: Any, **more: Any) -> None:
        super().compile(**more)
        self.first = optimizer
        self.others = {"last": keras.optimizers.RMSprop(0.02, momentum=0.9)}

    def train_step(self, data: Any) -> Any:
        x, y = data
        for optimizer, block in ((self.first, self.blocks[0]), (self.others["last"], self.blocks[2])):
            self.apply_gradients(optimizer, block.trainable_variables, lambda: self.loss_of(x, y))
        return self.get_metrics_result()

    def loss_of(self, x: Any, y: Any) -> Any:
        prediction = self(x, training=True)
        loss = self.compute_loss(x, y, prediction)
        self.norm.update_state(loss)
        self.compute_metrics(x, y, prediction)
        return loss

    def apply_gradients(self, optimizer: Any, variables: Any, loss: Any) -> None:
        if keras.backend.backend() == "torch":
            import torch

            self.zero_grad()
            loss().backward()
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in variables], variables)
            return
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss()
        optimizer.apply(tape.gradient(value, variables), variables)


def layers_of_model() -> list[Any]:
    layers = keras.layers
    first = [] if KIND == "unbuilt" else [layers.Input((4,))]
    return [*first, layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)]


def dataset() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(16, seed=7).batch(4).prefetch(2)


def generator() -> Iterator[Any]:
    random = np.random.default_rng(3)
    while True:
        chosen = random.integers(0, len(X), 4)
        yield X[chosen], Y[chosen]


def loader() -> Any:
    import torch

    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)


def data_of_fit() -> dict[str, Any]:
    if KIND == "dataset":
        return {"x": dataset()}
    if KIND == "generator":
        return {"x": generator(), "steps_per_epoch": BATCHES}
    if KIND == "loader":
        return {"x": loader()}
    if KIND == "passes":  # an epoch is half of a pass over the arrays
        return {"x": X, "y": Y, "batch_size": 4, "steps_per_epoch": BATCHES}
    return {"x": X, "y": Y, "batch_size": 4}


def main() -> None:
    keras.utils.set_random_seed(5)
    kinds = {"subclassed": Subclassed, "two_optimizers": TwoOptimizers}
    model = kinds[KIND]() if KIND in kinds else keras.Sequential(layers_of_model())
    model.compile(
        optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"],
        steps_per_execution=2 if KIND == "several_steps" else 1, jit_compile=True if KIND == "compiled" else "auto",
    )  # fmt: skip
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        Checkpoints(URL, every=2 if KIND == "several_steps" else 3, keep=2),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=0, min_delta=100.0),
        keras.callbacks.EarlyStopping(monitor="loss", patience=99),
        Log(),
    ]
    rows = X[:5] * 2, Y[:5]
    made = model.fit(**data_of_fit(), epochs=EPOCHS, callbacks=callbacks, validation_data=rows, verbose=0)
    values = {name: [float(value).hex() for value in column] for name, column in made.history.items()}
    with open(f"{URL}.history", "w") as file:
        json.dump({"epochs": made.epoch, **values}, file)


if __name__ == "__main__":
    main()
