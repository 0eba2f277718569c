"""The two states that every peer saves: a GPT in mixed precision, and very many small leaves."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import numpy as np
import torch

State = dict[str, Any]
"""torch tensors or numpy arrays, by name."""

BYTES_PER_PARAMETER = 14  # bf16 weight, fp32 master copy, two fp32 moments
WIDTH = 1024
VOCABULARY = 8192


def make(gib: float, leaves: int) -> State:
    """Return a state of `leaves` small leaves, or if that is 0, a GPT of about `gib` GiB. The values are always the same."""
    return small_leaves(leaves) if leaves else gpt(gib)


def gpt(gib: float) -> State:
    """Return the bf16 weights, fp32 master copy and Adam moments of a GPT: some hundred tensors with different values."""
    torch.manual_seed(0)
    parameters = int(gib * 2**30 / BYTES_PER_PARAMETER)
    layers = max(1, (parameters - VOCABULARY * WIDTH) // (12 * WIDTH * WIDTH))
    state: State = {}
    for name, shape in gpt_shapes(layers).items():
        weight = torch.randn(shape) * 0.02
        gradient = torch.randn(shape) * 1e-3
        state[f"model.{name}"] = weight.to(torch.bfloat16)
        state[f"optim.master.{name}"] = weight
        state[f"optim.exp_avg.{name}"] = gradient
        state[f"optim.exp_avg_sq.{name}"] = gradient.square()
    return state


def gpt_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a GPT, by name."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, WIDTH)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.attn.qkv.weight": (3 * WIDTH, WIDTH),
            f"layers.{i}.attn.out.weight": (WIDTH, WIDTH),
            f"layers.{i}.mlp.up.weight": (4 * WIDTH, WIDTH),
            f"layers.{i}.mlp.down.weight": (WIDTH, 4 * WIDTH),
            f"layers.{i}.ln1.weight": (WIDTH,),
            f"layers.{i}.ln2.weight": (WIDTH,),
        }
    return shapes


def small_leaves(count: int) -> State:
    """Return leaves of 1 to 64 KiB, like the norms and biases of a large model. They show the cost of metadata."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(256, 16384, (count,), generator=generator).tolist()
    return {f"block.{i // 20}.leaf.{i % 20}": torch.randn(n, generator=generator) for i, n in enumerate(sizes)}


def as_numpy(state: State) -> State:
    """Return the state as numpy arrays of the same memory, with the bfloat16 of ml_dtypes."""
    import ml_dtypes

    def convert(value: torch.Tensor) -> Any:
        if value.dtype == torch.bfloat16:
            return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return value.numpy()

    return {name: convert(value) for name, value in state.items()}


def nbytes(state: State) -> int:
    """Return the bytes of all leaves."""
    return sum(value.nbytes for value in state.values())


def blank(state: State) -> State:
    """Return a state of the same shapes with zeros, whose memory is allocated."""
    like = {name: value.clone() if isinstance(value, torch.Tensor) else value.copy() for name, value in state.items()}
    for value in like.values():
        value[...] = 0
    return like


def copy_seconds(state: State, target: State) -> float:
    """Return the seconds in which two threads copy the leaves of a state into those of another state."""
    pairs = [(as_bytes(target[name]), as_bytes(value)) for name, value in state.items()]
    halves = [(a[part], b[part]) for a, b in pairs for part in (slice(len(b) // 2), slice(len(b) // 2, None))]
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: [np.copyto(a, b) for a, b in halves[i::2]], range(2)))
    return time.perf_counter() - began


def as_bytes(value: Any) -> np.ndarray:
    """Return the memory of a contiguous tensor or array as bytes."""
    array = value.reshape(-1).view(torch.uint8).numpy() if isinstance(value, torch.Tensor) else value
    return array.reshape(-1).view(np.uint8)


def require_equal(loaded: State, state: State) -> None:
    """Raise AssertionError if a loaded leaf differs from the saved one."""
    for name, value in state.items():
        other = loaded[name]
        same = torch.equal(other, value) if isinstance(value, torch.Tensor) else bool((other == value).all())
        if not same:
            raise AssertionError(f"the loaded values of {name} differ from the saved ones")
