"""An optimizer whose parameters have another order than at the save: each parameter keeps its own moments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.groups.threads import ThreadGroup

torch = pytest.importorskip("torch")

WIDTH = 4
Make = Callable[[Any], Any]


def model() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
    )  # with equal shapes torch detects no difference


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1)


FORWARD: Make = lambda m: adam(list(m.parameters()))  # noqa: E731
BACKWARD: Make = lambda m: adam(list(m.parameters())[::-1])  # noqa: E731
NAMED: Make = lambda m: adam(list(m.named_parameters()))  # noqa: E731
NAMED_BACKWARD: Make = lambda m: adam(list(m.named_parameters())[::-1])  # noqa: E731


def two_groups(m: Any) -> Any:
    return torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in m.parameters() if p.dim() < 2], "lr": 0.3, "weight_decay": 0.0},
        ]
    )


def two_groups_swapped(m: Any) -> Any:
    return torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() < 2][::-1], "lr": 7.0},
            {"params": [p for p in m.parameters() if p.dim() > 1], "lr": 7.0},
        ]
    )


def train(m: Any, optimizer: Any, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        torch.manual_seed(seed + step)
        m(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def require_same_moments(a: Any, optimizer_a: Any, b: Any, optimizer_b: Any) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
        for key, value in optimizer_a.state[p].items():
            assert torch.equal(value, optimizer_b.state[q][key]), f"{name} {key}"


@pytest.mark.parametrize(("first", "second"), [(FORWARD, BACKWARD), (NAMED, NAMED_BACKWARD), (two_groups, two_groups_swapped)])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("model_first", [True, False])
def test_moments_follow_the_names(
    tmp_path: Path, first: Make, second: Make, used: bool, model_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    a = model()
    optimizer = first(a)
    train(a, optimizer, 2)
    state = {"model": a, "optimizer": optimizer}
    ckpt.save(state if model_first else dict(reversed(state.items())), tmp_path, 1)

    b = model()
    other = second(b)
    if used:
        train(b, other, 1, seed=9)
    with caplog.at_level(logging.WARNING, "ckpt"):
        ckpt.load(tmp_path, like={"model": b, "optimizer": other})
    assert any("another order" in record.message for record in caplog.records)
    require_same_moments(a, optimizer, b, other)
    by_first = {group["params"][0].dim(): group for group in optimizer.param_groups}
    for group in other.param_groups:
        if len(other.param_groups) > 1:
            assert group["lr"] == by_first[group["params"][0].dim()]["lr"]
            assert group["weight_decay"] == by_first[group["params"][0].dim()]["weight_decay"]
    for m, o in (a, optimizer), (b, other):
        train(m, o, 2, seed=5)
    require_same_moments(a, optimizer, b, other)


def test_moments_follow_the_names_that_torch_stores(tmp_path: Path) -> None:
    """The module is not in the state; the parameter groups have the names."""
    a, b = model(), model()
    optimizer, other = NAMED(a), NAMED_BACKWARD(b)
    if "param_names" not in optimizer.param_groups[0]:
        pytest.skip("this torch keeps no names of parameters")
    train(a, optimizer, 2)
    ckpt.save({"optimizer": optimizer}, tmp_path, 1)
    ckpt.load(tmp_path, like={"optimizer": other})
    b.load_state_dict(a.state_dict())
    require_same_moments(a, optimizer, b, other)
    assert other.param_groups[0]["param_names"] == [name for name, _ in b.named_parameters()][::-1]


def test_the_same_order_causes_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = model(), model()
    optimizer, other = two_groups(a), two_groups(b)
    train(a, optimizer, 2)
    with caplog.at_level(logging.WARNING, "ckpt"):
        ckpt.save({"model": a, "optimizer": optimizer}, tmp_path, 1)
        ckpt.load(tmp_path, like={"model": b, "optimizer": other})
    assert not caplog.records
    require_same_moments(a, optimizer, b, other)


def test_other_parameters_are_refused(tmp_path: Path) -> None:
    """They have the same number and shapes, but other names."""
    a, b = model(), model()
    optimizer = adam([a[0].weight, a[1].weight, a[2].bias])
    train(a, optimizer, 2)
    ckpt.save({"model": a, "optimizer": optimizer}, tmp_path, 1)
    other = adam([b[0].weight, b[2].weight, b[2].bias])
    with pytest.raises(ckpt.LeafMismatch, match=r"leaf optimizer: .*model\.1\.weight.*model\.2\.weight"):
        ckpt.load(tmp_path, like={"model": b, "optimizer": other})
    assert not other.state


def test_parameters_that_moved_between_groups_are_refused(tmp_path: Path) -> None:
    a, b = model(), model()
    optimizer, other = two_groups(a), two_groups(b)
    train(a, optimizer, 1)
    ckpt.save({"model": a, "optimizer": optimizer}, tmp_path, 1)
    first, second = other.param_groups
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]
    with pytest.raises(ckpt.LeafMismatch, match=r"leaf optimizer: .*groups.*ModelState"):
        ckpt.load(tmp_path, like={"model": b, "optimizer": other})


def test_moments_follow_renamed_parameters(tmp_path: Path) -> None:
    a, b = model(), model()
    optimizer, other = FORWARD(a), BACKWARD(b)
    train(a, optimizer, 2)
    ckpt.save({"model": a, "optimizer": optimizer}, tmp_path, 1)
    ckpt.load(tmp_path, like={"net": b, "optimizer": other}, rename={r"^net\.": "model."})
    require_same_moments(a, optimizer, b, other)


def test_a_step_without_parameter_names_loads_by_order(tmp_path: Path) -> None:
    """Parameters without names, as the module is not in the state, are matched by their order."""
    a, b = model(), model()
    optimizer, other = FORWARD(a), FORWARD(b)
    train(a, optimizer, 2)
    ckpt.save({"optimizer": optimizer}, tmp_path, 1)
    ckpt.load(tmp_path, like={"optimizer": other})
    b.load_state_dict(a.state_dict())
    require_same_moments(a, optimizer, b, other)


def test_moments_follow_the_names_on_many_ranks(tmp_path: Path) -> None:
    a = model()
    optimizer = FORWARD(a)
    train(a, optimizer, 2)
    groups = ThreadGroup.make(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda g: ckpt.save({"model": a, "optimizer": optimizer}, tmp_path, 1, group=g), groups))
    b = model()
    other = BACKWARD(b)
    ckpt.load(tmp_path, like={"model": b, "optimizer": other})
    require_same_moments(a, optimizer, b, other)
