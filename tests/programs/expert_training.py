"""One rank that trains mixtures of experts: `expert_training.py FOLDER STEPS [KILL_AT]`, under torchrun or alone.

Each layout names its experts as a library does. The losses of each step are equal, bit for bit, for any number of ranks: each
token goes to one expert, whose output the ranks exchange; the gate and the gradient of an expert do not depend on the others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt
from ckpt.adapters.torch import Experts, ModelState

WIDTH, EXPERTS, TOKENS = 8, 12, 96
CAPACITY = 9
"""The tokens that an expert takes in a step. Its buffers have a row for each of them."""

GROUP_SIZES = {"deepspeed": {1: 1, 2: 2, 4: 2, 6: 3}, "megatron": {1: 1, 2: 2, 4: 4, 6: 6}, "fastmoe": {1: 1, 2: 2, 4: 2, 6: 6}}
"""The number of ranks that divide the experts, by the number of ranks; the other ranks have copies."""

PATTERNS = {
    "deepspeed": [r"\.experts\.deepspeed_experts\."],
    "megatron": [r"\.experts\.linear_fc1\.weight(\d+)$", r"\.experts\.taken\.(\d+)$"],
    "fastmoe": [r"\.experts\."],
}


class SumOfRanks(torch.autograd.Function):
    """The sum over ranks of outputs of which only one is not zero. Its gradient goes to all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class InputOfRanks(torch.autograd.Function):
    """The input of the experts of all ranks. Its gradient is the sum over ranks, of which only one is not zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return SumOfRanks.apply(gradient, ctx.group), None


def initial(number: int) -> Tensor:
    """Return the first weights of an expert of the whole model."""
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number)) / WIDTH


class Expert(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial(number))
        self.register_buffer("taken", torch.zeros(CAPACITY, WIDTH))


class OneModuleEach(nn.Module):
    """As DeepSpeed's Experts: a module for each local expert."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList([Expert(number) for number in numbers])

    def tensors(self, i: int) -> tuple[Tensor, Tensor]:
        expert = self.deepspeed_experts[i]
        return expert.weight, expert.taken


class OneParameterEach(nn.Module):
    """As Megatron's grouped linear layers of Transformer Engine: weight0, weight1 …"""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.linear_fc1 = nn.Module()
        self.taken = nn.ParameterList([nn.Parameter(torch.zeros(CAPACITY, WIDTH), requires_grad=False) for _ in numbers])
        for i, number in enumerate(numbers):
            self.linear_fc1.register_parameter(f"weight{i}", nn.Parameter(initial(number)))

    def tensors(self, i: int) -> tuple[Tensor, Tensor]:
        return getattr(self.linear_fc1, f"weight{i}"), self.taken[i]


class OneStack(nn.Module):
    """As FastMoE's FMoELinear: one parameter with all local experts."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([initial(number) for number in numbers]))
        self.register_buffer("taken", torch.zeros(len(numbers), CAPACITY, WIDTH))

    def tensors(self, i: int) -> tuple[Tensor, Tensor]:
        return self.weight[i], self.taken[i]


KINDS = {"deepspeed": OneModuleEach, "megatron": OneParameterEach, "fastmoe": OneStack}


class Mixture(nn.Module):
    """A layer of experts behind a gate."""

    def __init__(self, layout: str, numbers: range, group: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = KINDS[layout](numbers)
        self.numbers, self.group = numbers, group

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        chosen = weights.argmax(1)
        output, given = torch.zeros_like(x), InputOfRanks.apply(x, self.group)
        for i, number in enumerate(self.numbers):
            places = (chosen == number).nonzero()[:CAPACITY, 0]
            weight, taken = self.experts.tensors(i)
            taken.data[: len(places)] = x.detach()[places]
            output = output.index_put((places,), torch.tanh(given[places] @ weight) + taken.mean() / 8)
        output = SumOfRanks.apply(output, self.group)
        return x + output * weights.gather(1, chosen[:, None])


def groups_of(count: int) -> tuple[Any, Any]:
    """Return the process group that divides the experts, a block of `count` ranks, and that of the copies of this rank."""
    if not dist.is_initialized():
        return None, None
    size, mine, copies = dist.get_world_size(), None, None
    for start in range(0, size, count):
        group = dist.new_group(list(range(start, start + count)))
        mine = group if start <= dist.get_rank() < start + count else mine
    for first in range(count):
        group = dist.new_group(list(range(first, size, count)))
        copies = group if dist.get_rank() % count == first else copies
    return mine, copies


def build(layout: str) -> tuple[nn.Module, torch.optim.Optimizer, ModelState]:
    """Return the model with the experts of this rank, its optimizer, and both as an entry of a state."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    count = GROUP_SIZES[layout][size]
    group, copies = groups_of(count)
    local = EXPERTS // count
    numbers = range(rank % count * local, (rank % count + 1) * local)
    model = nn.Sequential(Mixture(layout, numbers, group), Mixture(layout, numbers, group))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    where = Experts(group, copies=copies) if layout == "fastmoe" and group is not None else group
    return model, optimizer, ModelState(model, optimizer, experts=dict.fromkeys(PATTERNS[layout], where))


def train(layout: str, root: Path, stop: int, kill_at: int | None) -> None:
    model, optimizer, state = build(layout)
    with ckpt.Checkpointer(root / layout, every=1) as saver:
        _, start = saver.restore({"train": state})
        for step in range(start, stop):
            x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not dist.is_initialized() or dist.get_rank() == 0:
                with (root / f"{layout}.losses").open("a") as file:
                    file.write(json.dumps([step, loss.item().hex()]) + "\n")
            saver.save(step, {"train": state}).result()
            if step == kill_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    root, stop = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for layout in KINDS:
        train(layout, root, stop, int(sys.argv[3]) if len(sys.argv) > 3 and layout == "fastmoe" else None)


if __name__ == "__main__":
    main()
