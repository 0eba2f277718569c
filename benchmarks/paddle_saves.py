"""Compares ckpt with paddle.save and paddle.distributed.save_state_dict: seconds and bytes of the same model and AdamW state.

    .venv-frameworks/paddle-newest/bin/python benchmarks/paddle_saves.py [FOLDER] [MIB]

It needs the environment that `make test-framework-paddle` makes. MIB: size of the parameters; the moments take twice as much.
Each time is the smallest of five. Loads are from the page cache.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

import ckpt


def made(mib: int) -> dict[str, Any]:
    """Return a model of this size, and its optimizer after a step."""
    layers = max(1, mib // 16)
    model = paddle.nn.Sequential(*[paddle.nn.Linear(2048, 2048) for _ in range(layers)])
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    model(paddle.randn([2, 2048])).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    return {"model": model, "optimizer": optimizer}


def smallest_time(work: Callable[[int], object]) -> float:
    times = []
    for i in range(5):
        start = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - start)
    return min(times)


def change(state: dict[str, Any]) -> None:
    """Change every tensor, as a training step does."""
    with paddle.no_grad():
        for tensor in [*state["model"].state_dict().values(), *state["optimizer"].state_dict().values()]:
            if isinstance(tensor, paddle.Tensor) and tensor.size > 1:
                tensor.add_(paddle.full([1], 1e-4))


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as paddle.distributed.save_state_dict takes it."""
    parts = {**state["model"].state_dict(), **state["optimizer"].state_dict()}
    return {name: tensor for name, tensor in parts.items() if isinstance(tensor, paddle.Tensor)}


def measure(
    root: Path, state: dict[str, Any], what: str, save: Callable[[Path], object], load: Callable[[Path], object]
) -> None:
    saved = 0.0
    for i in range(5):
        change(state)
        folder = root / f"{what.split()[0]}-{i}"
        folder.mkdir(parents=True)
        start = time.perf_counter()
        save(folder)
        seconds = time.perf_counter() - start
        saved = seconds if not i else min(saved, seconds)
        if i < 4:
            shutil.rmtree(folder)
    loaded = smallest_time(lambda _: load(folder))
    print(f"{what:<40} save {saved:6.2f} s   load {loaded:6.2f} s   {size_of(folder) / 2**20:8.1f} MiB")
    shutil.rmtree(folder)


def main() -> None:
    root = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    state = made(int(sys.argv[2]) if len(sys.argv) > 2 else 128)

    def paddle_save(folder: Path) -> None:
        paddle.save(state["model"].state_dict(), str(folder / "model.pdparams"))
        paddle.save(state["optimizer"].state_dict(), str(folder / "optimizer.pdopt"))

    def paddle_load(folder: Path) -> None:
        state["model"].set_state_dict(paddle.load(str(folder / "model.pdparams")))
        state["optimizer"].set_state_dict(paddle.load(str(folder / "optimizer.pdopt")))

    def distributed_load(folder: Path) -> None:
        paddle.distributed.load_state_dict(flat(state), str(folder))

    try:
        measure(root, state, "ckpt.save", lambda f: ckpt.save(state, f, 0), lambda f: ckpt.load(f, like=state))
        measure(root, state, "paddle.save", paddle_save, paddle_load)
        measure(
            root, state, "paddle.distributed.save_state_dict",
            lambda f: paddle.distributed.save_state_dict(flat(state), str(f)), distributed_load,
        )  # fmt: skip
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
