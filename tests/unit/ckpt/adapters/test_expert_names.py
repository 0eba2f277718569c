"""Names and places of the experts of a mixture, as `ModelState(experts=)` derives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from helpers.messages import one_line
from torch import nn

import ckpt
from ckpt.adapters import torch_experts
from ckpt.adapters.torch import Experts, ModelState
from ckpt.adapters.torch_experts import ExpertNames, derived_copies
from ckpt.storage.base.errors import InvalidArgument


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a way to be a rank of eight; groups are tuples of ranks."""

    def be(number: int) -> None:
        monkeypatch.setattr(torch_experts, "own_rank", lambda: number)

    monkeypatch.setattr(torch_experts, "_ordered_ranks", lambda group: (torch_experts.own_rank(),) if group is None else group)
    monkeypatch.setattr(torch_experts, "model_ranks", lambda group: tuple(range(8)) if group == "auto" else group)
    be(0)
    return be


@pytest.mark.parametrize(
    ("group", "position", "ranks", "copies"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), 3, range(8), (3,)),
        ((4, 5, 6, 7), 1, range(8), (1, 5)),  # blocks
        ((1, 3, 5, 7), 2, range(8), (4, 5)),  # every second rank
        ((1, 5), 1, range(8), (4, 5, 6, 7)),
        ((4, 6), 0, range(8), (0, 1, 4, 5)),  # the middle axis of a 2 x 2 x 2 mesh
        ((3,), 0, range(4), (0, 1, 2, 3)),  # no division
        ((10, 14), 1, (10, 11, 14, 15), (14, 15)),  # a stage of a pipeline
        ((0, 1, 3), 0, range(6), None),
        ((1, 2), 0, range(4), None),  # crosses the border of a block
        ((0, 1, 2), 0, range(8), None),
        ((3, 2, 1, 0), 0, range(4), None),
        ((0, 9), 0, range(8), None),
    ],
)
def test_the_ranks_with_the_same_experts_follow_from_a_regular_group(
    group: Any, position: int, ranks: Any, copies: Any
) -> None:
    assert derived_copies(group, position, tuple(ranks)) == copies


LOCAL = ("0.gate.w", "0.experts.deepspeed_experts.0.fc.w", "0.experts.deepspeed_experts.1.fc.w", "1.mlp.experts.fc1.weight0",
         "1.mlp.experts.fc1.weight1", "1.mlp.experts.fc1.weight2", "2.htoh4.weight")  # fmt: skip


def test_an_expert_gets_its_number_in_the_whole_model(rank: Any) -> None:
    rank(5)
    names = ExpertNames(
        {r"deepspeed_experts": (4, 5), r"\.fc1\.weight(\d+)$": (1, 3, 5, 7), "htoh4": Experts((4, 5), (1, 5))}, "auto"
    )
    names.learn(LOCAL)
    assert [names.name(name) for name in LOCAL] == [
        "0.gate.w", "0.experts.deepspeed_experts.2.fc.w", "0.experts.deepspeed_experts.3.fc.w", "1.mlp.experts.fc1.weight6",
        "1.mlp.experts.fc1.weight7", "1.mlp.experts.fc1.weight8", "2.htoh4.weight",
    ]  # fmt: skip
    assert names.tensor("0.gate.w") is None
    expert, stack = names.tensor("1.mlp.experts.fc1.weight7"), names.tensor("2.htoh4.weight")
    assert expert is not None
    assert stack is not None
    assert expert.copies == (4, 5)
    assert not expert.is_divided((3, 4), None)
    assert (stack.copies, stack.global_shape((3, 4, 5)), stack.offset((3, 4, 5))) == ((1, 5), (6, 4, 5), (3, 0, 0))


def test_names_that_are_already_global_stay(rank: Any) -> None:
    rank(5)
    names = ExpertNames({r"\.experts\.": (4, 5)}, "auto")
    names.learn(["experts.up", "0.experts.2.w", "0.experts.3.w"][1:])
    assert names.name("0.experts.3.w") == "0.experts.3.w"


def test_which_parts_of_an_optimizer_state_are_divided(rank: Any) -> None:
    rank(1)
    names = ExpertNames({"stack": Experts((0, 1), None)}, (0, 1))
    names.learn(["stack"])
    tensor = names.tensor("stack")
    assert tensor is not None
    assert tensor.is_divided((3, 4, 5), (3, 4, 5))
    assert tensor.is_divided((3, 4), (3, 4, 5))  # a factored moment
    assert not tensor.is_divided((), (3, 4, 5))
    assert tensor.local_shape((6, 4, 5), (3, 4, 5)) == (3, 4, 5)
    assert tensor.local_shape((6, 5), (3, 4, 5)) == (3, 5)
    assert tensor.local_shape((), (3, 4, 5)) == ()


@pytest.mark.parametrize(
    ("experts", "names", "words"),
    [
        ({"experts": (1, 2)}, LOCAL, ("rank 0 is not in the group",)),
        ({"experts": Experts((0, 1), (1, 5))}, LOCAL, ("rank 0 is not among the copies",)),
        ({"deepspeed_experts": (0, 1, 3)}, LOCAL, ("does not show which ranks", "Experts(group, copies=…)")),
        ({"htoh4": (0, 1)}, LOCAL, ("does not show which ranks", "2.htoh4.weight")),
        ({r"\.(\w+)\.fc\.": (0, 1), "0.(gate)": (0, 1)}, LOCAL, ("'gate'", "number of the expert")),
        ({"experts": (0, 1)}, ["experts.1.w", "experts.3.w"], ("[1, 3]", "number them from 0")),
    ],
)  # fmt: skip
def test_groups_and_names_that_do_not_determine_the_experts_are_refused(
    rank: Any, experts: dict[str, Any], names: list[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        ExpertNames(experts, "auto").learn(names)
    one_line(raised, "ModelState: experts=", *words)


def test_one_process_with_all_experts_saves_and_loads_them(tmp_path: Path) -> None:
    def model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, ModelState]:
        torch.manual_seed(seed)
        made = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])})
        optimizer = torch.optim.AdamW(made.parameters())
        return made, optimizer, ModelState(made, optimizer, experts={r"experts\.": None})

    one, optimizer, state = model(0)
    one["experts"][1](torch.ones(1, 2)).sum().backward()  # the other experts got no token, so they have no moments
    optimizer.step()
    ckpt.save({"train": state}, tmp_path, step=1)
    other, second, target = model(1)
    ckpt.load(tmp_path, {"train": target})
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert [len(second.state.get(p, {})) for p in other.parameters()] == [0, 0, 3, 3, 0, 0]


def test_another_group_than_a_process_group_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="process group"):
        ModelState(nn.Linear(1, 1), experts={"experts": 3})
