"""A rank that trains for three batches by the fit of a framework; the last loss of rank 1 is not a number.

Usage:

    bad_last_loss.py FRAMEWORK URL          FRAMEWORK: "paddle" or "keras"
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np


def fit_with_paddle(x: Any, saving: dict[str, Any]) -> None:
    import paddle

    from ckpt.adapters.paddle import Checkpoints

    class Rows(paddle.io.Dataset):
        def __getitem__(self, index: int) -> Any:
            return x[index], x[index, :1]

        def __len__(self) -> int:
            return len(x)

    net = paddle.nn.Linear(4, 1)
    model = paddle.Model(net)
    model.prepare(paddle.optimizer.Adam(parameters=net.parameters()), paddle.nn.MSELoss())
    model.fit(Rows(), batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=[Checkpoints(**saving)])


def fit_with_keras(x: Any, saving: dict[str, Any]) -> None:
    import keras

    from ckpt.adapters.keras import Checkpoints

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    model.fit(x, x[:, :1], batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=[Checkpoints(**saving)])


def main() -> None:
    framework, url = sys.argv[1:]
    x = np.ones((12, 4), "float32")
    if os.environ["RANK"] == "1":
        x[-1] = np.nan
    {"paddle": fit_with_paddle, "keras": fit_with_keras}[framework](x, {"url": url, "every": None, "timeout": 60})


if __name__ == "__main__":
    main()
