"""One of four ranks under torchrun, for test_experts.py: `expert_checks.py FOLDER CHECK…` runs the checks in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.torchrun import run_checks
from torch import nn

import ckpt
from ckpt.adapters.torch import Experts, ModelState
from ckpt.errors import LeafMismatch, StepRefused

ROOT = Path()  # set by `run_checks`
PATTERN = r"\.experts\."


def make(numbers: list[int], rows: int = 1) -> nn.Module:
    """Return a model with a gate and these experts, whose weights are their numbers."""
    torch.manual_seed(0)
    layer = nn.Module()
    layer.gate = nn.Linear(2, 8)
    layer.experts = nn.ModuleList([nn.Linear(2, 2) for _ in numbers])
    layer.register_buffer("received", torch.zeros(rows, 2))
    for expert, number in zip(layer.experts, numbers, strict=True):
        nn.init.constant_(expert.weight, number)
        nn.init.constant_(expert.bias, number)
    return nn.Sequential(layer)


def refused(state: Any, url: Path) -> str:
    """Return the message with which all ranks refuse to save a state."""
    try:
        ckpt.save({"train": state}, url, 1, timeout=60)
    except StepRefused as error:
        return str(error)
    raise AssertionError("the step was not refused")


def blocks() -> tuple[int, Any, Any]:
    """Return the position of this rank in its block of two ranks, that block, and the ranks at the same position."""
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    rank = dist.get_rank()
    return rank % 2, made[rank // 2], made[2 + rank % 2]


def different_numbers() -> None:
    """Check that ranks with different numbers of experts are refused, and save nothing."""
    count = 3 if dist.get_rank() == 0 else 2
    message = refused(ModelState(make([0] * count), experts={PATTERN: dist.group.WORLD}), ROOT / "uneven")
    assert ".experts." in message, message


def copies_that_differ() -> None:
    """Check that experts that are not copies are refused: here each rank has other experts, but the group says otherwise."""
    _, group, _ = blocks()
    state = ModelState(make([2 * dist.get_rank(), 2 * dist.get_rank() + 1]), experts={PATTERN: group})
    message = refused(state, ROOT / "drifted")
    assert "model.0.experts." in message and "has other bytes" in message, message  # noqa: PT018


def without_a_token() -> None:
    """Save experts of which some have made no step, others one or two; each loads its own, in one process."""
    position, group, _ = blocks()
    numbers = [2 * position, 2 * position + 1]
    model = make(numbers)
    optimizer = torch.optim.AdamW(model[0].experts.parameters())
    for expert, number in zip(model[0].experts, numbers, strict=True):
        for _ in range(number % 3):
            expert(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = ModelState(model, optimizer, experts={PATTERN: group})
    assert len(optimizer.state) == 2 * sum(number % 3 > 0 for number in numbers)
    ckpt.save({"train": state}, ROOT / "tokens", 1)
    whole = make([9] * 4)
    other = torch.optim.AdamW(whole[0].experts.parameters())
    ckpt.load(ROOT / "tokens", {"train": ModelState(whole, other, experts={PATTERN: None}, group=None)}, group=None)
    steps = [int(other.state[expert.weight]["step"]) if expert.weight in other.state else 0 for expert in whole[0].experts]
    assert steps == [0, 1, 2, 0], steps
    assert all(torch.equal(whole[0].experts[n].bias, e.bias) for n, e in zip(numbers, model[0].experts, strict=True))


def stack() -> None:
    """Save a stack whose copies are given, and a step count that all ranks have; a stack without copies is refused."""
    position, group, copies = blocks()
    layer = nn.Module()
    layer.experts = nn.Module()
    layer.experts.weight = nn.Parameter(torch.stack([torch.full((2, 2), 1.0 + 2 * position + i) for i in range(2)]))
    model = nn.Sequential(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model[0].experts.weight.square().sum().backward()
    optimizer.step()
    try:
        ModelState(model, optimizer, experts={PATTERN: group})
    except ckpt.InvalidArgument as error:
        assert "copies=" in str(error)
    else:
        raise AssertionError("a stack needs copies=")
    ckpt.save({"train": ModelState(model, optimizer, experts={PATTERN: Experts(group, copies)})}, ROOT / "stack", 1)
    loaded = ckpt.load(ROOT / "stack", group=None)["train"]
    assert loaded["model"]["0.experts.weight"][:, 0, 0].tolist() == [1, 2, 3, 4]
    moments = loaded["optimizer"]["state"]["0.experts.weight"]
    assert moments["exp_avg"].shape == (4, 2, 2)
    assert moments["step"].item() == 1


def rows_of_a_rank() -> None:
    """Check that a buffer whose shape depends on the number of ranks is refused by its name, and nothing is changed."""
    position, group, _ = blocks()
    ckpt.save({"train": ModelState(make([2 * position, 2 * position + 1], rows=4), experts={PATTERN: group})}, ROOT / "rows", 1)
    whole = make([9] * 4, rows=16)
    try:
        ckpt.load(ROOT / "rows", {"train": ModelState(whole, experts={PATTERN: None}, group=None)}, group=None)
    except LeafMismatch as error:
        assert "train.model.0.received" in str(error), error
    else:
        raise AssertionError("a buffer of another shape was loaded")
    assert whole[0].experts[0].bias.tolist() == [9, 9]


if __name__ == "__main__":
    run_checks(globals())
