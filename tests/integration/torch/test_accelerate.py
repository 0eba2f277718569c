"""Objects that accelerate wraps are saved, restored and attached like the wrapped ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.refusal import refused
from helpers.torchrun import check_on_torch_ranks

import ckpt

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def prepared() -> dict[str, Any]:
    """Return a model, its optimizer, schedule and data as accelerate wraps them."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 3)), batch_size=2)
    made = accelerate.Accelerator(cpu=True).prepare(model, optimizer, schedule, data)
    return dict(zip(("model", "optimizer", "schedule", "data"), made, strict=True))


def test_a_wrapped_optimizer_is_attached_and_restored(tmp_path: Path, prepared: dict[str, Any]) -> None:
    state = {name: prepared[name] for name in ("model", "optimizer", "schedule")}
    with ckpt.Checkpointer(tmp_path, every=1) as saver:
        saver.attach(state["optimizer"])
        for step in range(3):
            state["optimizer"].zero_grad()
            state["model"](torch.ones(2, 3)).sum().backward()
            state["optimizer"].step()  # waits until the previous save has copied the state
            state["schedule"].step()
            saver.step(step, state)
        saver.wait()
        want = state["model"].weight.detach().clone()
        rate = state["optimizer"].param_groups[0]["lr"]
        with torch.no_grad():
            state["model"].weight.zero_()
        state["optimizer"].param_groups[0]["lr"] = 5.0
        _, start = saver.restore(state)
        assert start == 3
    assert torch.equal(state["model"].weight.detach(), want)
    assert state["optimizer"].param_groups[0]["lr"] == rate


def test_a_data_loader_without_state_is_refused_by_name(tmp_path: Path, prepared: dict[str, Any]) -> None:
    with refused(ckpt.UnsupportedLeaf, "leaf data", "DataLoaderShard", "dl_state_dict"):
        ckpt.save(prepared, tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_attaching_an_object_that_is_no_optimizer_is_refused(tmp_path: Path, prepared: dict[str, Any]) -> None:
    with ckpt.Checkpointer(tmp_path) as saver, refused(ckpt.CkptError, "register_step_pre_hook"):
        saver.attach(prepared["model"])


@pytest.mark.parametrize(
    "check", ["the_state_of_one_rank_is_refused", "the_hook_of_one_rank_fails", "another_rank_has_begun_the_first_save"]
)
def test_all_ranks_give_a_save_without_a_number_the_same_one(tmp_path: Path, check: str) -> None:
    check_on_torch_ranks("accelerate_checks.py", 2, tmp_path, check)


def test_a_host_without_the_folder_of_accelerate_loads_nothing_else(tmp_path: Path) -> None:
    check_on_torch_ranks("accelerate_checks.py", 2, tmp_path, "a_host_lacks_the_folder_of_accelerate")
