"""Compares ckpt with mindspore.save_checkpoint: seconds of saves and loads of the same net and Adam state, as medians of turns.

    .venv-frameworks/mindspore-newest/bin/python benchmarks/mindspore_saves.py [FOLDER] [MIB]

It needs the environment that `make test-framework-mindspore` makes. MIB: size of the parameters; the moments take twice as
much.
Loads are from the page cache. ckpt waits for the disk at the end of a save; MindSpore does not.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from mindspore import nn

import ckpt

TURNS = 7
RANDOM = np.random.default_rng(0)


def made(mib: int) -> dict[str, Any]:
    """Return a net of this size, and its optimizer."""
    net = nn.SequentialCell(*[nn.Dense(2048, 2048) for _ in range(max(1, mib // 16))])
    return {"net": net, "optimizer": nn.Adam(net.trainable_params(), 1e-3)}


def parameters(state: dict[str, Any]) -> list[Any]:
    """Return all parameters of the net and of its optimizer."""
    return list({id(p): p for cell in state.values() for p in cell.get_parameters()}.values())


def change(state: dict[str, Any]) -> None:
    """Change every parameter, as a training step does, to values that do not compress."""
    for parameter in parameters(state):
        parameter.asnumpy()[...] += RANDOM.standard_normal(parameter.shape, np.float32).astype(parameter.asnumpy().dtype)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    root = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    state = made(int(sys.argv[2]) if len(sys.argv) > 2 else 64)
    net, optimizer = state["net"], state["optimizer"]

    def mindspore_save(folder: Path) -> None:
        ms.save_checkpoint([{"name": p.name, "data": p} for p in parameters(state)], str(folder / "state.ckpt"))

    def mindspore_load(folder: Path) -> None:
        found = ms.load_checkpoint(str(folder / "state.ckpt"))
        ms.load_param_into_net(net, found)
        ms.load_param_into_net(optimizer, found)

    ways = {
        "ckpt": (lambda folder: ckpt.save(state, folder, 0), lambda folder: ckpt.load(folder, like=state)),
        "mindspore": (mindspore_save, mindspore_load),
    }
    times: dict[tuple[str, str], list[float]] = {}
    try:
        for turn in range(TURNS + 1):
            for name, (save, load) in ways.items():
                change(state)
                folder = root / f"{name}-{turn}"
                folder.mkdir()
                for what, work in (("save", save), ("load", load)):
                    taken = seconds(lambda work=work, folder=folder: work(folder))
                    if turn:  # the first turn is a warm-up
                        times.setdefault((name, what), []).append(taken)
                shutil.rmtree(folder)
    finally:
        shutil.rmtree(root)
    for (name, what), found in times.items():
        print(f"{name:<10} {what}  {statistics.median(found):6.2f} s   ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
