"""Small frozen leaves and trained ones never share a block, so that a step writes only what training has changed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.groups.threads import ThreadGroup

torch = pytest.importorskip("torch")
from ckpt.adapters.torch import ModelState  # noqa: E402

LAYERS, WIDTH, RANK = 24, 96, 4


class Adapted(torch.nn.Module):  # type: ignore[misc]
    """A frozen layer with a trained one of low rank beside it, and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x)) * self.scale


def make() -> tuple[Any, Any]:
    model = torch.nn.Sequential(*(Adapted() for _ in range(LAYERS)))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def step(model: Any, optimizer: Any) -> None:
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_bytes(model: Any) -> int:
    """Of the parameters that change, with their two moments and counts of steps."""
    return sum(3 * p.nbytes + 4 for p in model.parameters() if p.requires_grad)


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "module": lambda m, o: {"model": m, "optimizer": o},
    "optimizer first": lambda m, o: {"optimizer": o, "model": m},
    "ModelState": ModelState,
    "parameters": lambda m, o: {"model": dict(m.named_parameters()), "optimizer": o},
    "of this rank": lambda m, o: ckpt.PerRank({"model": m, "optimizer": o}),
}


def written(model: Any, url: Path, number: int, save: Callable[[Any], Any]) -> int:
    save(number)
    return int(ckpt.open(url)[number].commit.written_bytes)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_writes_what_was_trained(tmp_path: Path, form: str) -> None:
    model, optimizer = make()
    step(model, optimizer)
    save = lambda number: ckpt.save(FORMS[form](model, optimizer), tmp_path, number, codec="none")  # noqa: E731
    first = written(model, tmp_path, 1, save)
    step(model, optimizer)
    second = written(model, tmp_path, 2, save)
    assert first > LAYERS * WIDTH * WIDTH * 4
    padding = 64 * sum(3 for _ in model.parameters()) + 16384
    assert second < trained_bytes(model) + padding


def test_ranks_write_what_was_trained(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, optimizer = make()
    step(model, optimizer)
    groups = ThreadGroup.make(2)

    def save(number: int) -> None:
        state = FORMS["module"](model, optimizer)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda g: ckpt.save(state, tmp_path, number, codec="none", group=g), groups))

    written(model, tmp_path, 1, save)
    step(model, optimizer)
    assert written(model, tmp_path, 2, save) < trained_bytes(model) + 64 * LAYERS * 20 + 32768


def test_thawed_parameters_are_written(tmp_path: Path) -> None:
    """What was frozen and is trained from now on moves to other blocks, and a load has its values."""
    model, _ = make()
    ckpt.save({"model": model}, tmp_path, 1)
    model.requires_grad_(True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ckpt.save({"model": model}, tmp_path, 2)
    fresh, _ = make()
    ckpt.load(tmp_path, like={"model": fresh})
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
