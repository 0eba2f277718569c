"""Measures deferred blocks: an attached Checkpointer copies the state during the next forward and backward.

The training loop waits in `save`, and in the next step() of the optimizer for the end of the copy.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from probes import training_step
from results import LazyResult

import ckpt

BYTES_PER_PARAMETER = 12  # fp32 weight and the two moments of Adam
SHAPE = (1024, 4096)
STEP_SECONDS_PER_GIB = 0.5  # the time of forward and backward, which is longer than a copy at 2 GB/s


def measure(folder: Path, gib: float, repeat: int) -> LazyResult:
    """Save a model and its Adam state `repeat` times during training, after one save as warm-up, whose data are checked."""
    model, optimizer = make(gib)
    state = {"model": model, "optimizer": optimizer}
    nbytes = sum(t.nbytes for t in tensors(plain(state)))
    found = LazyResult(nbytes, STEP_SECONDS_PER_GIB * nbytes / 2**30, [], [])
    hooks: list[float] = []  # the times at which the attached hook began and ended
    with ckpt.Checkpointer(folder, every=None, keep=1) as checkpointer:
        optimizer.register_step_pre_hook(lambda *_: hooks.append(time.perf_counter()))
        checkpointer.attach(optimizer)
        optimizer.register_step_pre_hook(lambda *_: hooks.append(time.perf_counter()))
        for step in range(repeat + 1):
            before = [t.clone() for t in tensors(plain(state))] if step == 0 else []
            began = time.perf_counter()
            handle = checkpointer.save(step, state)
            stall = time.perf_counter() - began
            train(found.step_seconds)
            optimizer.step()
            handle.result()
            if step == 0:
                require_equal(tensors(ckpt.load(folder)), before)
            else:
                found.save_seconds.append(stall)
                found.wait_seconds.append(hooks[1] - hooks[0])
            hooks.clear()
    return found


def make(gib: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return layers with a state of about `gib` GiB, with gradients, and their optimizer after one step of Adam."""
    torch.manual_seed(0)
    layers = max(1, int(gib * 2**30 / BYTES_PER_PARAMETER / (SHAPE[0] * SHAPE[1])))
    model = torch.nn.ModuleList(torch.nn.Linear(*SHAPE, bias=False) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 1e-3
    optimizer.step()
    return model, optimizer


def train(seconds: float) -> None:
    """Run training steps for this long, in place of a forward and a backward pass."""
    step = training_step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        step()


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dicts of all objects of a state."""
    return {name: part.state_dict() for name, part in state.items()}


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return all tensors of nested dicts and lists, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def require_equal(loaded: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
    """Raise AssertionError if the loaded tensors differ from the saved ones."""
    if len(loaded) != len(saved) or not all(map(torch.equal, loaded, saved)):
        raise AssertionError("lazy staging did not store the state at the time of the save")
