"""A loop with accelerate that is killed in the middle of an epoch and resumed has the losses of one that never stopped."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers.hf_runs import check_loop_continuation, run
from helpers.refusal import refused

import ckpt
from ckpt.adapters.accelerate import attach


@pytest.mark.parametrize("seedable", [pytest.param(False, marks=pytest.mark.essential), True])
def test_a_killed_loop_continues_as_before(tmp_path: Path, seedable: bool) -> None:
    check_loop_continuation(tmp_path, seedable=seedable)


def test_killed_loops_of_two_processes_go_on_as_before(tmp_path: Path) -> None:
    check_loop_continuation(tmp_path, 2, samples=28)


def test_killed_loops_of_two_processes_with_hooks_that_write_files(tmp_path: Path) -> None:
    check_loop_continuation(tmp_path, 2, samples=28, hooks=True)


@pytest.mark.parametrize("dispatch", [False, True])
def test_data_without_a_length(tmp_path: Path, dispatch: bool) -> None:
    """The batch that is fetched ahead has the random numbers that it had, and the order is that of the start of the epoch."""
    check_loop_continuation(tmp_path, stream="permuted", dispatch=dispatch)


@pytest.mark.parametrize("options", [{"stream": "own"}, {"own": True}])
def test_order_of_a_generator_that_continues_from_epoch_to_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    check_loop_continuation(tmp_path, **options)
    check_loop_continuation(tmp_path / "last", saves=[7], saved=7, kill_at=8, first=(1, 0), **options)


@pytest.mark.parametrize("options", [{"own": True}, {"own": "generator"}, {"stream": "own"}, {"seedable": True}])
def test_saved_after_the_loop_of_an_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    """The next epoch has the order that it had, also from a generator of the loader or sampler."""
    check_loop_continuation(tmp_path, saves=[], saves_after_epoch=[7], saved=7, kill_at=8, first=(1, 0), **options)


def test_order_of_a_seed_that_the_resumed_process_does_not_have(tmp_path: Path) -> None:
    """SeedableRandomSampler takes the seed of the process, which a script may never set."""
    check_loop_continuation(tmp_path, seedable=True, seed_of_resume=4)


def test_data_without_a_length_dispatched_to_two_processes(tmp_path: Path) -> None:
    check_loop_continuation(tmp_path, 2, stream="permuted", samples=27)


def test_batches_dispatched_to_two_processes(tmp_path: Path) -> None:
    check_loop_continuation(tmp_path, 2, dispatch=True, seedable=True, samples=28)


@pytest.mark.parametrize("options", [{}, {"seedable": True}, {"stream": "permuted"}])
def test_saved_in_the_last_batch_of_an_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    check_loop_continuation(tmp_path, saves=[7], saved=7, kill_at=8, first=(1, 0), **options)


def test_stream_that_draws_with_the_model_is_warned_of(tmp_path: Path) -> None:
    """The training draws between the fetches of two batches, and that is not repeated when the stream is read again."""
    options = {"program": "accelerate_training.py", "stream": "buffered"}
    run(tmp_path, "killed", kill_at=11, saved=9, **options)
    status, printed = run(tmp_path, "again", resume=True, **options)
    assert status == 0
    assert "global generator of torch" in printed


def prepared() -> tuple[Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    return accelerator, accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))


def test_a_step_by_its_number_and_the_newest(tmp_path: Path) -> None:
    accelerator, _ = prepared()
    attach(accelerator, tmp_path / "run")
    (weight,) = (p for p in accelerator._models[0].parameters() if p.dim() == 2)
    assert accelerator.load_state() is None
    for step in (5, 7):
        with torch.no_grad():
            weight.fill_(step)
        accelerator.save_state(f"out/step_{step}").result()
    assert accelerator.load_state("out/step_5") == 5
    assert weight[0, 0] == 5
    assert accelerator.load_state() == 7
    assert accelerator.save_state().result().step == 8
    with pytest.raises(ckpt.StepNotFound):
        accelerator.load_state("step_6")
    with refused(ckpt.InvalidArgument, "'nowhere'", "does not end with a step number"):
        accelerator.load_state("nowhere")
    accelerator.end_training()


def test_a_folder_that_the_script_makes_for_other_files_is_no_checkpoint(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    expected = model.weight.detach().clone()
    accelerator.save_state(str(tmp_path / "out/step_2"))  # as accelerate does it
    attached = attach(accelerator, tmp_path / "run")
    (tmp_path / "out/step_3").mkdir()
    (tmp_path / "out/step_3/config.json").write_text("{}")
    accelerator.save_state(str(tmp_path / "out/step_3")).result()
    for name, found in (("out/step_3", 3), ("out/step_2", None)):
        with torch.no_grad():
            model.weight.add_(1)
        assert accelerator.load_state(str(tmp_path / name)) == found
        assert torch.equal(model.weight, expected)
    attached.close()


class Average:
    """The mean of the models that it has seen, as scripts keep it for diffusion models; no object of the Accelerator."""

    value = 0.0

    def save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        assert Path(folder).name == "step_1"
        assert len(models) == len(weights) == 1
        Path(folder, "average").mkdir()
        Path(folder, "average/value.txt").write_text(str(self.value))
        Path(folder, "empty").touch()

    def load(self, models: list[Any], folder: str) -> None:
        assert len(models) == 1
        assert Path(folder, "empty").read_bytes() == b""
        self.value = float(Path(folder, "average/value.txt").read_text())


def test_files_of_hooks_are_stored_in_the_step(tmp_path: Path) -> None:
    accelerator, _ = prepared()
    attached = attach(accelerator, tmp_path / "run")
    average = Average()
    accelerator.register_save_state_pre_hook(average.save)
    accelerator.register_load_state_pre_hook(average.load)
    model = accelerator._models[0]
    for name, value in (("a/step_1", 0.5), ("b/step_1", 0.25)):
        average.value = value
        accelerator.save_state(name).result()
    expected = model.weight.detach().clone()
    average.value = 9
    with torch.no_grad():
        model.weight.add_(1)
    assert accelerator.load_state("step_1") == accelerator.load_state() == 1
    assert average.value == 0.25
    assert torch.equal(model.weight, expected)
    assert not list(tmp_path.rglob("value.txt"))
    attached.close()


def test_a_model_that_a_hook_saves_and_loads_keeps_what_the_hook_has_loaded(tmp_path: Path) -> None:
    """These are the hooks of the training scripts of diffusers: both remove the model from their list."""
    accelerator, _ = prepared()
    attached = attach(accelerator, tmp_path / "run")
    model = accelerator._models[0]

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save({name: value + 1 for name, value in models[0].state_dict().items()}, f"{folder}/model.pt")
        weights.pop()

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state("step_1").result()
    expected = model.weight.detach() + 1
    with torch.no_grad():
        model.weight.zero_()
    assert accelerator.load_state("step_1") == 1
    assert torch.equal(model.weight, expected)
    attached.close()


def test_a_load_hook_without_a_save_hook_gets_an_empty_folder(tmp_path: Path) -> None:
    accelerator, _ = prepared()
    attached = attach(accelerator, tmp_path / "run")
    found: list[Any] = []
    accelerator.register_load_state_pre_hook(lambda models, folder: found.extend([len(models), *Path(folder).iterdir()]))
    assert accelerator.load_state() is None
    accelerator.save_state("step_1").result()
    assert accelerator.load_state() == 1
    assert found == [1]
    attached.close()


def test_a_hook_that_changes_the_weights_is_refused(tmp_path: Path) -> None:
    accelerator, _ = prepared()
    attached = attach(accelerator, tmp_path / "run")
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights[0].pop("bias"))
    with refused(ckpt.InvalidArgument, "register_save_state_pre_hook", "changed the weights", "write its own file"):
        accelerator.save_state("step_1")
    attached.close()
    assert ckpt.open(tmp_path / "run").steps() == []


def test_loaders_of_an_attempt_that_ran_out_of_memory_are_forgotten(tmp_path: Path) -> None:
    """`find_executable_batch_size` calls `free_memory` before each attempt, and the dataset may take much of the memory."""
    accelerator = Accelerator(cpu=True)
    attach(accelerator, tmp_path)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    accelerator.save_state()
    watched = weakref.ref(data)
    del data, loader
    accelerator.free_memory()
    accelerator.prepare(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), batch_size=1))
    gc.collect()
    assert watched() is None
