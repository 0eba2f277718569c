"""Measures differences: stored bytes and speed, for states that change as in RL fine-tuning, in Adam, and in embeddings.

    python benchmarks/differences.py [--mb 256] [--rounds 5]

For each state it prints, as medians of interleaved rounds with the lowest and the highest value:

- the part of the raw bytes that a difference, an exclusive or and the plain codecs need, and their speed on one core;
- what `ckpt.save` writes with and without `full_every`, and how long the save and the load of the step take.

The states are simulated: weights of a normal distribution, gradients of a log-normal scale, and real Adam updates. fp32 master
weights and moments are compared over 100 steps, everything else over one.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ckpt
from ckpt.format import codec
from ckpt.format.block_difference import subtract
from ckpt.saving import difference_encoder

Array = np.ndarray[Any, Any]
BLOCK_BYTES = 8 << 20


class Adam:
    """fp32 master weights, moments, and noisy gradients whose scale differs between elements."""

    def __init__(self, count: int, rate: float, seed: int = 1) -> None:
        self._draw = np.random.default_rng(seed)
        self.rate = rate
        self.weights = self._draw.standard_normal(count, np.float32) * np.float32(0.02)
        self._scale = np.exp(self._draw.standard_normal(count, np.float32)) * np.float32(1e-4)
        self.second = self._scale**2
        deviation = np.float32((0.1 / 1.9) ** 0.5)  # of the running mean of independent gradients, after many steps
        self.first = self._draw.standard_normal(count, np.float32) * self._scale * deviation

    def step(self) -> None:
        """Make one update."""
        gradient = self._draw.standard_normal(len(self.weights), np.float32) * self._scale
        self.first += np.float32(0.1) * (gradient - self.first)
        self.second += np.float32(0.001) * (gradient * gradient - self.second)
        self.weights -= np.float32(self.rate) * self.first / (np.sqrt(self.second) + np.float32(1e-8))


def rl_weights(count: int, rate: float) -> tuple[Array, Array]:
    """Return bf16 weights before and after one step of Adam on fp32 master weights."""
    adam = Adam(count, rate)
    before = adam.weights.astype(ml_dtypes.bfloat16)
    adam.step()
    return before.view(np.uint16), adam.weights.astype(ml_dtypes.bfloat16).view(np.uint16)


def adam_state(count: int) -> dict[str, tuple[Array, Array]]:
    """Return fp32 weights and both moments before and after 100 steps at a learning rate of 1e-4."""
    adam = Adam(count, 1e-4)
    before = {name: getattr(adam, name).copy() for name in ("weights", "first", "second")}
    for _ in range(100):
        adam.step()
    return {name: (old, getattr(adam, name)) for name, old in before.items()}


def touched_rows(count: int, share: float, width: int = 1024) -> tuple[Array, Array]:
    """Return an fp32 embedding before and after an update of a part of its rows."""
    draw = np.random.default_rng(5)
    before = draw.standard_normal((max(1, count // width), width), np.float32)
    after = before.copy()
    rows = draw.random(len(before)) < share
    after[rows] += draw.standard_normal((int(rows.sum()), width), np.float32) * np.float32(1e-4)
    return before, after


def spread(values: list[float], form: str = "{:.2f}") -> str:
    """Return the median with the lowest and the highest value."""
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def blocks_of(array: Array) -> list[Array]:
    """Return the bytes of an array in blocks."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[at : at + BLOCK_BYTES] for at in range(0, len(flat), BLOCK_BYTES)]


def as_difference(new: Array, old: Array, width: int) -> int:
    """Encode the difference as a save does; return the stored bytes."""
    out = np.empty_like(new)
    subtract(new, old, width, out)
    middle = len(out) // 2 // 65536 * 65536
    return len(codec.encode(difference_encoder.choose_difference_codec(out[middle : middle + 65536], width), out, width))


def as_xor(new: Array, old: Array, width: int) -> int:
    """Encode the exclusive or with the same choice of codecs; return the stored bytes."""
    out = np.bitwise_xor(new, old)
    middle = len(out) // 2 // 65536 * 65536
    return len(codec.encode(difference_encoder.choose_difference_codec(out[middle : middle + 65536], width), out, width))


def plain(config: str) -> Callable[[Array, Array, int], int]:
    """Return a function that encodes the block itself."""
    return lambda new, _, width: len(codec.encode(config, new, width))


WAYS: dict[str, Callable[[Array, Array, int], int]] = {
    "difference": as_difference,
    "exclusive or": as_xor,
    "plain zstd, shuffled": plain('{"blocksize": 0, "clevel": 1, "cname": "zstd", "id": "blosc", "shuffle": 1}'),
    "plain lz4, bit-shuffled": plain('{"blocksize": 0, "clevel": 1, "cname": "lz4", "id": "blosc", "shuffle": 2}'),
}


def compare_codecs(name: str, old: Array, new: Array, rounds: int) -> None:
    """Print what each way stores, and its speed on one core."""
    from numcodecs import blosc

    blosc.set_nthreads(1)
    pairs = list(zip(blocks_of(new), blocks_of(old), strict=True))
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    stored: dict[str, int] = {}
    for _ in range(rounds):
        for way, encode in WAYS.items():
            began = time.process_time()
            stored[way] = sum(encode(a, b, new.itemsize) for a, b in pairs)
            speeds[way].append(new.nbytes / 1e9 / (time.process_time() - began))
    for way in WAYS:
        print(f"  {name:28} {way:24} {stored[way] / new.nbytes:7.4f} of raw   {spread(speeds[way])} GB/s", flush=True)


def compare_saves(name: str, states: tuple[dict[str, Array], dict[str, Array]], rounds: int, folder: Path) -> None:
    """Print what a save of the second state writes, and the time of the save and of a load, with and without differences."""
    raw = sum(array.nbytes for array in states[1].values())
    results: dict[int | None, list[tuple[float, float, float]]] = {None: [], 1000: []}
    for _ in range(rounds):
        for full_every, found in results.items():
            run = folder / "run"
            ckpt.save(states[0], run, 0, full_every=full_every, codec="none")
            began = time.perf_counter()
            step = ckpt.save(states[1], run, 1, full_every=full_every, codec="none")
            saved = time.perf_counter()
            loaded = ckpt.load(run, step=1)
            ended = time.perf_counter()
            assert all(np.array_equal(loaded[key], states[1][key]) for key in states[1])
            found.append((step.commit.written_bytes / raw, saved - began, ended - saved))
            shutil.rmtree(run)
    for full_every, found in results.items():
        written, save, load = (list(column) for column in zip(*found, strict=True))
        rates = [[raw / 1e9 / seconds for seconds in column] for column in (save, load)]
        print(
            f"  {name:28} full_every={full_every!s:5} writes {statistics.median(written):7.4f} of raw  save {spread(rates[0])} "
            f"GB/s   load {spread(rates[1])} GB/s", flush=True,
        )  # fmt: skip


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="megabytes of each array")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder by default")
    options = parser.parse_args()
    nbytes = options.mb * 1_000_000
    cases = {f"bf16 weights, rate {rate:g}": rl_weights(nbytes // 2, rate) for rate in (1e-6, 3e-6, 1e-5, 1e-4)}
    adam = adam_state(nbytes // 4)
    cases |= {f"fp32 {name}, 100 steps": pair for name, pair in adam.items()}
    cases |= {f"embedding, {share:.0%} of rows": touched_rows(nbytes // 4, share) for share in (0.01, 0.1)}
    print(
        f"codecs, one core, {options.mb} MB each, medians of {options.rounds} interleaved rounds (lowest to highest)",
        flush=True,
    )
    for name, (old, new) in cases.items():
        compare_codecs(name, old, new, options.rounds)
    print("saves and loads of the second state")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, (old, new) in cases.items():
            if "fp32" not in name:
                compare_saves(name, ({"w": old}, {"w": new}), options.rounds, Path(folder))
        both = tuple({name: pair[which] for name, pair in adam.items()} for which in (0, 1))
        compare_saves("fp32 Adam state, 100 steps", (both[0], both[1]), options.rounds, Path(folder))


if __name__ == "__main__":
    main()
