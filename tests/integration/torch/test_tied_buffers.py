"""An array that is a parameter anywhere in the state is one, whatever else it is: ranks must have equal values of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.groups.threads import ThreadGroup
from ckpt.saving.replica_samples import samples_of
from ckpt.state.tree import flatten

torch = pytest.importorskip("torch")
from ckpt.adapters.torch import ModelState  # noqa: E402


class Buffered(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, values: Any) -> None:
        super().__init__()
        self.register_buffer("values", values)


class Owner(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, values: Any, trained: bool) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(values, requires_grad=trained)


class Model(torch.nn.Module):  # type: ignore[misc]
    """A module whose submodules have these values as a buffer, a frozen and a trained parameter, in the order of `kinds`."""

    def __init__(self, kinds: tuple[str, ...], values: Any) -> None:
        super().__init__()
        for kind in kinds:
            made = Buffered(values) if kind == "buffer" else Owner(values, trained=kind == "trained")
            self.add_module(kind, made)


def _values(fill: float = 1.0) -> Any:
    return torch.full((3, 3), fill)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "module": lambda model: {"m": model},
    "ModelState": lambda model: {"m": ModelState(model)},
    "ModelState of each": lambda model: {name: ModelState(part) for name, part in model.named_children()},
    "modules": lambda model: dict(model.named_children()),
    "compiled": lambda model: {"m": torch.compile(model)},
}


@pytest.mark.parametrize("form", WRAPPERS)
@pytest.mark.parametrize(
    "kinds", [kinds for count in (2, 3) for kinds in permutations(["buffer", "frozen", "trained"], count) if "trained" in kinds]
)
def test_a_trained_parameter_that_is_something_else_first_is_trained(kinds: tuple[str, ...], form: str) -> None:
    flat = flatten(WRAPPERS[form](Model(kinds, _values())), rank=0)
    assert len(flat.leaves) == 1
    assert (flat.buffers, flat.frozen) == (set(), set())
    assert samples_of(flat).keys() == flat.leaves.keys()


@pytest.mark.parametrize("module_first", [True, False])
@pytest.mark.parametrize("kind", ["buffer", "frozen"])
def test_a_trained_parameter_outside_of_the_module_counts(kind: str, module_first: bool) -> None:
    model = Model((kind,), _values())
    parameter = torch.nn.Parameter(next(iter(model.state_dict().values())))
    state = {"m": model, "p": [parameter]}
    flat = flatten(state if module_first else dict(reversed(state.items())), rank=0)
    assert (len(flat.leaves), flat.buffers, flat.frozen) == (1, set(), set())


@pytest.mark.parametrize("form", WRAPPERS)
@pytest.mark.parametrize("kinds", [("buffer", "frozen"), ("frozen", "buffer"), ("buffer",), ("frozen",)])
def test_an_array_that_is_nowhere_trained_is_a_frozen_parameter_or_else_a_buffer(kinds: tuple[str, ...], form: str) -> None:
    flat = flatten(WRAPPERS[form](Model(kinds, _values())), rank=0)
    expected = set(flat.leaves)
    assert (flat.buffers, flat.frozen) == ((set(), expected) if "frozen" in kinds else (expected, set()))


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_a_diverged_weight_that_is_a_buffer_first_is_refused(tmp_path: Path, kind: str) -> None:
    def save(group: Any) -> None:
        model = Model(("buffer", kind), _values(group.rank + 1.0))
        with pytest.raises(ckpt.StepRefused, match=r"leaf m\.buffer\.values has other bytes on rank 1"):
            ckpt.save({"m": model}, tmp_path, 1, group=group)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, ThreadGroup.make(2)))
    assert ckpt.open(tmp_path).steps() == []
