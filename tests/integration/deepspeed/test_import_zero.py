"""ckpt-import of folders that DeepSpeed has saved: all weights and moments, and refusals of incomplete folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.torchrun import check_on_torch_ranks

import ckpt
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_step import command

FOLDERS = ("stage1", "stage2", "stage3", "bf16", "round-robin")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose folder `own` has the checkpoints of two ranks of DeepSpeed."""
    folder = tmp_path_factory.mktemp("own")
    check_on_torch_ranks("deepspeed_checks.py", 2, folder, "save_own_folders")
    return folder


def load_imported(source: Path, url: Path) -> Any:
    assert command.main([str(source), str(url), "--step", "3"], standalone_mode=False) == 0
    return ckpt.load(url)


@pytest.mark.parametrize("name", FOLDERS)
def test_all_arrays_are_those_that_deepspeed_gathers(saved: Path, name: str) -> None:
    state = load_imported(saved / "own" / name, saved / f"imported-{name}")
    expected = torch.load(saved / "own" / f"{name}.pt")
    assert state["model"].pop("head.weight") is state["model"]["embed.weight"]
    found = {f"model.{key}": value for key, value in state["model"].items()}
    for key, values in state["optimizer"]["state"].items():
        assert values["step"] == 3
        found |= {f"optimizer.state.{key}.{moment}": values[moment] for moment in ("exp_avg", "exp_avg_sq")}
    if name == "round-robin":  # DeepSpeed can gather only the weights of the model then
        assert all(torch.equal(found[key].to(value.dtype), value) for key, value in expected.items() if key in found)
        return
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value.to(found[key].dtype)), key
    assert [group["weight_decay"] for group in state["optimizer"]["groups"].values()] == [0.05, 0.0]
    assert (state["engine"]["global_steps"], state["lr_scheduler"]) == (3, {"last_batch_iteration": 2})
    assert (state["client_state"]["epoch"], state["client_state"]["order"].tolist()) == (4, [0, 1, 2])


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_engine_continues_from_an_imported_step(saved: Path, ranks: int) -> None:
    for name in ("stage1", "stage3"):
        shutil.rmtree(saved / f"imported-{name}", ignore_errors=True)
        load_imported(saved / "own" / name, saved / f"imported-{name}")
    check_on_torch_ranks("deepspeed_checks.py", ranks, saved, "load_imported")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def _remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _add_object(folder: Path) -> None:
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save(torch.load(path) | {"evil": Evil()}, path)


def _truncate(folder: Path) -> None:
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-300])


def _other_layout(folder: Path) -> None:
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    content = torch.load(path)
    del content["param_shapes"]
    torch.save(content, path)


def _other_step(folder: Path) -> None:
    path = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    torch.save(torch.load(path) | {"global_steps": 2}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: _remove(f, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), "lacks the optimizer file of rank 0"),
        (lambda f: _remove(f, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), "of 1 ranks, and was saved by 2"),
        (lambda f: _remove(f, "zero_pp_rank_1_mp_rank_00_model_states.pt"), "the checkpoint is incomplete"),
        (_add_object, "has objects that weights_only refuses .*print"),
        (_truncate, "is no file of torch.save, or is damaged"),
        (_other_step, "files of different steps"),
        (_other_layout, r"have not the layout of DeepSpeed \(KeyError: 'param_shapes'\)"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(saved: Path, tmp_path: Path, change: Any, message: str) -> None:
    shutil.copytree(saved / "own" / "stage3", tmp_path / "source")
    change(tmp_path / "source" / "global_step3")
    with pytest.raises(CkptError, match=message):
        load_imported(tmp_path / "source", tmp_path / "url")
    assert not (tmp_path / "url").exists()
