"""ckpt-import of folders that DeepSpeed has saved: all weights and moments, and refusals of incomplete folders."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.deepspeed_cpu import converts_groups_of_stage_3
from helpers.imports import growth_of_memory, load_imported
from helpers.torchrun import check_on_torch_ranks

from ckpt.storage.base.errors import CkptError

needs_universal = pytest.mark.skipif(
    not converts_groups_of_stage_3(), reason="this version of DeepSpeed cannot convert stage 3 with two groups of parameters"
)
FOLDERS = ("stage1", "stage2", "stage3", "bf16", "round-robin", pytest.param("universal3", marks=needs_universal))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose folder `own` has the checkpoints of two ranks of DeepSpeed."""
    folder = tmp_path_factory.mktemp("own")
    check_on_torch_ranks("deepspeed_checks.py", 2, folder, "save_own_folders")
    own = folder / "own"
    if not converts_groups_of_stage_3():
        return folder
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers=1", "--num_merge_workers=1"]
    folders = ["--input_folder", own / "stage3" / "global_step3", "--output_folder", own / "universal3"]
    subprocess.run([*convert, *folders], check=True, capture_output=True, timeout=600)
    shutil.copy(own / "stage3.pt", own / "universal3.pt")
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_all_arrays_are_those_that_deepspeed_gathers(saved: Path, name: str) -> None:
    state = load_imported(saved / "own" / name, "--step", 3, to=saved / f"imported-{name}")
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
    for name in ("stage1", "stage3", *["universal3"] * converts_groups_of_stage_3()):
        shutil.rmtree(saved / f"imported-{name}", ignore_errors=True)
        load_imported(saved / "own" / name, "--step", 3, to=saved / f"imported-{name}")
    check_on_torch_ranks("deepspeed_checks.py", ranks, saved, "load_imported")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def _remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _shorten(folder: Path) -> None:
    path = folder / "zero" / "first.weight" / "exp_avg.pt"
    torch.save(torch.load(path)[:-1].clone(), path)


def _add_object(folder: Path) -> None:
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save(torch.load(path) | {"evil": Evil()}, path)


class Attribute:
    """An attribute of a class, stored as a call of getattr."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (OrderedDict, "clear")


def _add_attribute(folder: Path) -> None:
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save(torch.load(path) | {"evil": Attribute()}, path)


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
        (_add_attribute, "has objects that weights_only refuses .*getattr"),
        (_truncate, "is not a file of torch.save, or is damaged"),
        (_other_step, "files of different steps"),
        (_other_layout, r"do not have the layout of DeepSpeed \(KeyError: 'param_shapes'\)"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(saved: Path, tmp_path: Path, change: Any, message: str) -> None:
    shutil.copytree(saved / "own" / "stage3", tmp_path / "source")
    change(tmp_path / "source" / "global_step3")
    with pytest.raises(CkptError, match=message):
        load_imported(tmp_path / "source", to=tmp_path / "url")
    assert not (tmp_path / "url").exists()


@needs_universal
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: _remove(f, "zero/optimizer_state.pt"), "optimizer_state.pt does not exist: the universal checkpoint"),
        (lambda f: _remove(f, "zero/first.bias/fp32.pt"), r"do not have the layout of DeepSpeed \(KeyError: 'fp32'\)"),
        (lambda f: _remove(f, "zero_pp_rank_1_mp_rank_00_model_states.pt"), "the checkpoint is incomplete"),
        (_shorten, "does not have the 403 elements of its parameter"),
        (_other_layout, r"do not have the layout of DeepSpeed \(KeyError: 'param_shapes'\)"),
    ],
)
def test_a_universal_folder_that_is_not_whole_is_refused(saved: Path, tmp_path: Path, change: Any, message: str) -> None:
    shutil.copytree(saved / "own" / "universal3", tmp_path / "source")
    change(tmp_path / "source")
    with pytest.raises(CkptError, match=message):
        load_imported(tmp_path / "source", to=tmp_path / "url")
    assert not (tmp_path / "url").exists()


def write_folder(folder: Path, size: int) -> Path:
    """Write a checkpoint of stage 3 of one rank, with one parameter."""
    folder.mkdir()
    state = {"step": 1, "exp_avg": torch.ones(size), "exp_avg_sq": torch.ones(size)}
    optimizer = {
        "fp32_flat_groups": [torch.ones(size)], "partition_count": 1,
        "optimizer_state_dict": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }  # fmt: skip
    torch.save({"optimizer_state_dict": optimizer}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    model = {"param_shapes": [{"weight": torch.Size([size])}], "module": {}, "buffer_names": [], "global_steps": 1}
    torch.save(model, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_memory_does_not_grow_with_the_folder(tmp_path: Path) -> None:
    """A small folder first loads all modules; then 600 MB are imported with much less memory, and without DeepSpeed."""
    small, big = write_folder(tmp_path / "small", 1), write_folder(tmp_path / "big", 3 << 24)
    assert growth_of_memory(small, big, tmp_path, absent="deepspeed") < 400 << 20
