"""Small frozen and trained leaves never share a block, so that a step writes only the leaves that training has changed."""

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
    """A frozen layer with a trained low-rank layer beside it, and a constant buffer."""

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
    """Return the bytes of the parameters that change, with their two moments and counts of steps."""
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
def test_a_step_writes_only_trained_leaves(tmp_path: Path, form: str) -> None:
    model, optimizer = make()
    step(model, optimizer)
    save = lambda number: ckpt.save(FORMS[form](model, optimizer), tmp_path, number, codec="none")  # noqa: E731
    first = written(model, tmp_path, 1, save)
    step(model, optimizer)
    second = written(model, tmp_path, 2, save)
    assert first > LAYERS * WIDTH * WIDTH * 4
    padding = 64 * sum(3 for _ in model.parameters()) + 16384
    assert second < trained_bytes(model) + padding


def test_ranks_write_only_trained_leaves(tmp_path: Path) -> None:
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
    """A frozen parameter that is trained from now on moves to another block, and a load has its values."""
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


STATES: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda m, o: {"model": m.state_dict(), "optimizer": o.state_dict()},
    "numpy": lambda m, o: {name: value.numpy().copy() for name, value in m.state_dict().items()},
    "of this rank": lambda m, o: ckpt.PerRank(m.state_dict()),
}


def saved_often(model: Any, optimizer: Any, url: Path, form: str, how: str, steps: int) -> list[int]:
    """Return the bytes that each of the first steps has written."""
    ck = ckpt.Checkpointer(url, every=1, keep=steps, codec="none") if how == "Checkpointer" else None
    for number in range(1, steps + 1):
        step(model, optimizer)
        state = STATES[form](model, optimizer)
        if how == "save":
            ckpt.save(state, url, number, codec="none")
        elif ck is None:
            ckpt.save(state, url, number, codec="none", blocking=False).result()
        else:
            ck.save(number, state)
    if ck is not None:
        ck.close()
    repository = ckpt.open(url)
    return [int(repository[number].commit.written_bytes) for number in range(1, steps + 1)]


@pytest.mark.parametrize("how", ["save", "in the background", "Checkpointer"])
@pytest.mark.parametrize("form", STATES)
def test_unchanged_leaves_are_detected_without_a_declaration(tmp_path: Path, form: str, how: str) -> None:
    """The first saves detect which leaves change; the third one, or the next one after overlapping saves, puts the others in
    blocks of their own."""
    model, optimizer = make()
    steps = 8 if how == "Checkpointer" else 4
    first, *_, last = saved_often(model, optimizer, tmp_path, form, how, steps)
    assert first > LAYERS * WIDTH * WIDTH * 4
    assert last <= trained_bytes(model) + 64 * sum(3 for _ in model.parameters()) + 16384
    fresh, _ = make()
    found = ckpt.load(tmp_path, step=steps)
    values = found["model"] if form == "state_dict" else found
    fresh.load_state_dict({name: torch.as_tensor(value) for name, value in values.items()})
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


def test_a_leaf_trained_later_leaves_the_blocks_of_unchanged_ones(tmp_path: Path) -> None:
    model, optimizer = make()
    steady = saved_often(model, optimizer, tmp_path / "a", "numpy", "save", 5)[-1]
    late = next(p for p in model.parameters() if not p.requires_grad)
    make_state = lambda: STATES["numpy"](model, optimizer)  # noqa: E731
    before = make_state()
    sizes = []
    for number in range(6, 10):
        with torch.no_grad():
            late.add_(1)
        ckpt.save(make_state(), tmp_path / "a", number, codec="none")
        sizes.append(int(ckpt.open(tmp_path / "a")[number].commit.written_bytes))
    assert sizes[-1] <= steady + late.nbytes + 4096 < LAYERS * WIDTH * WIDTH * 2
    loaded = ckpt.load(tmp_path / "a", step=9)
    assert sum(not (loaded[name] == value).all() for name, value in before.items()) == 1


def test_each_rank_detects_its_unchanged_leaves(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, optimizer = make()
    groups = ThreadGroup.make(2)
    for number in range(1, 6):
        step(model, optimizer)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda g, s=state, n=number: ckpt.save(s, tmp_path, n, codec="none", group=g), groups))
    assert int(ckpt.open(tmp_path)[5].commit.written_bytes) < trained_bytes(model) + 64 * LAYERS * 20 + 32768
    loaded = ckpt.load(tmp_path)
    assert all(torch.equal(torch.as_tensor(loaded[name]), value) for name, value in model.state_dict().items())


def test_blocks_are_not_planned_again_where_all_leaves_change(tmp_path: Path) -> None:
    """A leaf that is added later and does not change is detected."""
    state = {f"a{i}": torch.zeros(1000) for i in range(50)}

    def save(number: int) -> Any:
        for name, value in state.items():
            if name.startswith("a"):
                value.add_(1)
        ckpt.save(state, tmp_path, number, codec="none")
        return ckpt.open(tmp_path)[number]

    plans = [[(row.leaf, row.start, row.raw) for row in save(number).manifest().rows] for number in range(1, 5)]
    assert all(plan == plans[0] for plan in plans)
    state |= {f"b{i}": torch.zeros(1000) for i in range(50)}
    written = [save(number).commit.written_bytes for number in range(5, 10)]
    assert written[0] > 90 * 4000
    assert written[-1] < 60 * 4096
