"""The loop of the training runs on Megatron-Core: it resumes the newest step, saves each step, and may kill itself."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as torch_dist
from megatron.core import parallel_state

from ckpt.adapters import megatron as megatron_adapter
from programs.megatron_on_cpu import without_cuda


def parser_of(steps: int) -> argparse.ArgumentParser:
    """Return a parser of the options that all training runs have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("losses", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--torch-dist", action="store_true", help="save in Megatron's own format, too")
    parser.add_argument("--compare", type=int, default=0, help="load this step in both formats and require equal tensors")
    return parser


def start(tp: int, pp: int = 1) -> None:
    """Make the groups of processes, on the CPU."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, pp)
    without_cuda()


def folder_of(options: argparse.Namespace, step: int) -> str:
    return str(options.folder / f"iter_{step:07}")


def resume(options: argparse.Namespace, target: Callable[[], Any], set_state: Callable[[Any], int]) -> int:
    """Load the newest step, and return its number, or 0 if there is none.

    target: returns the state dict to be filled. set_state: sets what was loaded, and returns the number that it has.
    """
    newest = max((int(path.name) for path in (options.folder / "ckpt" / "steps").glob("*/")), default=0)
    return set_state(megatron_adapter.load(target(), folder_of(options, newest))) if newest else 0


def train(options: argparse.Namespace, start: int, loss_after: Callable[[int], Any], state: Callable[[int], Any]) -> None:
    """Train and save the steps after `start`.

    loss_after: trains the step with this number, and returns its loss. state: returns what is saved.
    """
    for step in range(start + 1, options.steps + 1):
        loss = loss_after(step)
        with options.losses.with_name(f"{options.losses.name}.{dist.get_rank()}").open("a") as file:
            file.write(f"{step} {loss.item().hex()}\n")
        if step == options.kill_at and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        megatron_adapter.save(state(step), folder_of(options, step))
        if options.torch_dist:
            Path(folder_of(options, step)).mkdir(exist_ok=True, parents=True)
            torch_dist.save(state(step), folder_of(options, step))


def loaded_in_both_formats(options: argparse.Namespace, load_into: Callable[[Callable[[Any], Any]], Any]) -> list[Any]:
    """Return what `load_into` returns for ckpt and for Megatron's own format; it calls the function with a state dict."""
    folder = folder_of(options, options.compare)
    return [load_into(lambda state, load=load: load(state, folder)) for load in (megatron_adapter.load, torch_dist.load)]


def equal(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else bool(ours == theirs)
