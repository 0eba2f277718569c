"""One rank under torchrun, for tests/integration/torch: `accelerate_checks.py FOLDER CHECK…` runs the checks in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from helpers.torchrun import run_checks

import ckpt
from ckpt.adapters.accelerate import AttachedAccelerator, attach
from ckpt.repository.repository import Repository

ROOT = Path()  # set by `run_checks`


class Custom:
    """An object of register_for_checkpointing, whose state may be one that can't be saved."""

    value: Any = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def attached(folder: str) -> tuple[Accelerator, Custom, AttachedAccelerator]:
    """Return an Accelerator with a model, a custom object, and what saves both to a folder."""
    accelerator, custom = Accelerator(cpu=True), Custom()
    model = torch.nn.Linear(3, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(custom)
    return accelerator, custom, attach(accelerator, ROOT / folder)


def check_numbers_after_a_failure(folder: str, fail: Callable[[Accelerator, Custom], None], *errors: type[Exception]) -> None:
    """Save three steps, of which the second fails on rank 0. All ranks then save the third one.

    errors: those of the second save on rank 0 and on rank 1.
    """
    accelerator, custom, saver = attached(folder)
    assert accelerator.save_state().result().step == 0
    if dist.get_rank() == 0:
        fail(accelerator, custom)
    with pytest.raises(errors[dist.get_rank()]):
        accelerator.save_state().result()
    custom.value = 3
    accelerator._save_model_state_pre_hook.clear()
    assert accelerator.save_state().result().step == 2
    assert ckpt.open(ROOT / folder).steps() == [0, 2]
    saver.close()


def the_state_of_one_rank_is_refused() -> None:
    def fail(accelerator: Accelerator, custom: Custom) -> None:
        custom.value = len  # a function

    check_numbers_after_a_failure("refused", fail, ckpt.UnsupportedLeaf, ckpt.StepRefused)


def the_hook_of_one_rank_fails() -> None:
    def hook(*_: object) -> None:
        raise RuntimeError("no space for the file of a hook")

    def fail(accelerator: Accelerator, custom: Custom) -> None:
        accelerator.register_save_state_pre_hook(hook)

    check_numbers_after_a_failure("hook", fail, RuntimeError, ckpt.errors.StepSkipped)


def another_rank_has_begun_the_first_save() -> None:
    """Rank 1 looks for steps when the folder of the first save exists already, which rank 0 has begun."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Repository, "step_numbers", lambda _: [0])
        accelerator, _, saver = attached("begun")
    assert accelerator.save_state().result().step == 0
    saver.close()


def a_host_lacks_the_folder_of_accelerate() -> None:
    """Rank 0 has a folder that accelerate has saved. Rank 1 lacks it, and loads nothing from the repository instead."""
    accelerator, _, saver = attached("own")
    accelerator.save_state(str(ROOT / "step_0")).result()
    if dist.get_rank() == 0:
        folder = ROOT / "host-0" / "step_0"  # without the weights, so that accelerate itself raises, too
        folder.mkdir(parents=True)
        (folder / "random_states_0.pkl").touch()
    dist.barrier()
    with pytest.raises((OSError, ValueError), match="host-"):
        accelerator.load_state(str(ROOT / f"host-{dist.get_rank()}" / "step_0"))
    saver.close()


if __name__ == "__main__":
    run_checks(globals())
