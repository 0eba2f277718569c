"""Trains by fit of Keras, and knows nothing of ckpt: plain_keras_training.py LOG [FITS [SECONDS]].

LOG gets a line for each batch: its number, the loss, and the process. Each further fit has a model of its own. KERAS_BACKEND
chooses the backend. SECONDS is how long each validation takes.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import keras
import numpy as np

LOG, FITS = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 0
BATCHES, EPOCHS = 16 if SECONDS else 8, 2 if SECONDS else 3
X = np.random.default_rng(0).normal(size=(BATCHES * 4, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Log(keras.callbacks.Callback):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(SECONDS)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with open(LOG, "a") as file:
            file.write(f"{self.first + self.epoch * BATCHES + batch} {float(logs['loss']).hex()} {os.getpid()}\n")
        time.sleep(0.05)


def train(first: int) -> None:
    layers = keras.layers
    model = keras.Sequential([layers.Input((4,)), layers.Dense(16, activation="relu"), layers.Dropout(0.3), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    model.fit(X, Y, 4, EPOCHS, 0, [Log(first)], validation_data=(X[:4], Y[:4]) if SECONDS else None)
    print("history", first, {name: [float(value).hex() for value in model.history.history[name]] for name in ("loss", "mae")})
    print("weights", first, float(sum(np.asarray(weight, "float64").sum() for weight in model.get_weights())).hex())


def main() -> None:
    keras.utils.set_random_seed(5)
    for number in range(FITS):
        train(1000 * number)


if __name__ == "__main__":
    main()
