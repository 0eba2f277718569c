"""Trains by fit of Keras with each kind of `callbacks`, and knows nothing of ckpt: plain_keras_callbacks.py LOG.

LOG gets a line for each batch of a fit that has callbacks: its number, the loss, and the process. The output has a line for
each fit with the number of batches whose end a callback has seen. KERAS_BACKEND chooses the backend.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import keras
import numpy as np

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Log(keras.callbacks.Callback):
    """Counts the batches, and writes them into the log."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        with open(sys.argv[1], "a") as file:
            file.write(f"{batch} {float(logs['loss']).hex()} {os.getpid()}\n")


def main() -> None:
    keras.utils.set_random_seed(5)
    for kind in ("without", "none", "empty", "single", "list", "nested", "CallbackList"):
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        log = Log()
        callbacks: dict[str, Any] = {
            "none": None, "empty": [], "single": log, "list": [log], "nested": [[log], ()],
            "CallbackList": keras.callbacks.CallbackList([log], add_history=True, model=model, epochs=1, steps=8),
        }  # fmt: skip
        model.fit(X, Y, 4, verbose=0, **({"callbacks": callbacks[kind]} if kind in callbacks else {}))
        print("fit", kind, log.count)


if __name__ == "__main__":
    main()
