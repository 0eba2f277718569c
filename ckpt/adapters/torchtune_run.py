"""One training run of a torchtune recipe: its saves, and the step from which it resumes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckpt.adapters.peft import AdapterState
from ckpt.checkpointer import Checkpointer
from ckpt.repository.repository import Url
from ckpt.state.stateful import RandomState
from ckpt.storage.base.errors import InvalidArgument
from ckpt.training.save_interval import Every

log = logging.getLogger("ckpt")

_PARTS = ("_model", "_dataloader", "_gradient_accumulation_steps", "epochs_run", "global_step", "max_steps_per_epoch")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where and how often a training run saves."""

    url: Url
    every: Every
    keep: int | None
    resume: bool
    """Whether to continue from the newest step."""


class TrainedState(AdapterState):
    """The trained parameters and the buffers of a model, and its optimizers, as one entry of a state."""

    def _selected(self, model: Any) -> list[str]:
        return [
            *(name for name, _ in model.named_buffers(remove_duplicate=False)),
            *(name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad),
        ]


class Progress:
    """How far a training run is, as an entry of a state: epochs, batches of the epoch, optimizer steps."""

    def __init__(self, recipe: Any, batches: Batches) -> None:
        self._recipe, self._batches = recipe, batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it depends on."""
        return {
            "epoch": self._batches.epoch, "batches": self._batches.done, "global_step": self._recipe.global_step,
            "seed": self._recipe.seed, "data": self._batches.shape(),
        }  # fmt: skip

    def state_dict_like(self, saved: Any, everything: bool) -> dict[str, Any]:
        """Return what a load fills; raise ValueError if the position is one in other data."""
        current, stored = self._batches.shape(), saved["data"]
        for name, value in current.items():
            if stored.get(name) != value:
                raise ValueError(
                    f"the saved position in the data has {name} {stored.get(name)}, and this run has {value}: set the "
                    "configuration to the saved value, or train into a new repository (checkpointer.ckpt)"
                )
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        if state["seed"] != self._recipe.seed:
            log.warning(
                "the seed is %s as in the saved training, and not %s as in the configuration", state["seed"], self._recipe.seed
            )
        self._recipe.seed = state["seed"]
        self._recipe.epochs_run, self._recipe.global_step = state["epoch"], state["global_step"]
        self._batches.resume(state["epoch"], state["batches"])


class Schedule:
    """The schedule of the learning rate as an entry of a state, without the `step` that torchtune sets on it."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the schedule."""
        return {name: value for name, value in self._schedule.state_dict().items() if name != "step"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the values of the schedule."""
        self._schedule.load_state_dict(state)


class Batches:
    """The data loader of a recipe, which begins at the position of a step, and reports each batch that is done."""

    def __init__(self, recipe: Any, run: RecipeRun) -> None:
        self._recipe, self._run = recipe, run
        self._loader = recipe._dataloader
        self.epoch, self.done = recipe.epochs_run, 0
        self._resumed: int | None = None
        self._random: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def shape(self) -> dict[str, int]:
        """Return what the meaning of a number of batches depends on, by the name that a user knows."""
        sampler = getattr(self._loader, "sampler", None)
        return {
            "batch_size": self._loader.batch_size,
            "gradient_accumulation_steps": self._recipe._gradient_accumulation_steps,
            "data-parallel ranks": getattr(sampler, "num_replicas", 1),
            "batches of an epoch": len(self._loader),
        }

    def resume(self, epoch: int, done: int) -> None:
        """Continue with this epoch, after its first `done` batches."""
        self.epoch, self.done, self._resumed = epoch, done, done

    def note_random(self) -> None:
        """Remember the saved state of the random generators: the next batch of the resumed epoch begins with it."""
        self._random = RandomState().state_dict()

    def last(self) -> int:
        """Return the number of batches of an epoch up to its last optimizer step."""
        per_step: int = self._recipe._gradient_accumulation_steps
        return int(min(len(self._loader) // per_step * per_step, self._limit()))

    def _limit(self) -> float:
        """Return the number of batches after which the recipe ends an epoch early."""
        steps = self._recipe.max_steps_per_epoch
        return math.inf if steps is None else steps * self._recipe._gradient_accumulation_steps

    def __iter__(self) -> Iterator[Any]:
        self.epoch, self.done = self._recipe.epochs_run, 0
        resumed, self._resumed = self._resumed, None
        # In a resumed epoch, the recipe counts only the batches after the restart, so that it would pass its limit.
        limit = math.inf if resumed is None else self._limit()
        if resumed is not None and resumed >= limit:  # a sampler that resumes there yields nothing, and keeps the position
            self.done = resumed
            return
        batches = iter(self._loader) if resumed is None else self._continued(resumed)
        while self.done < limit:
            if self.done:
                self._run.batch_done()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.done += 1
            yield batch

    def _continued(self, done: int) -> Iterator[Any]:
        """Return the batches of the epoch after those that are done, with the random numbers of the saved training."""
        sampler: Any = getattr(self._loader, "sampler", None)
        is_stateful = hasattr(sampler, "load_state_dict") and type(self._loader).__name__ == "StatefulDataLoader"
        if is_stateful:
            sampler.load_state_dict({"yielded": done * self._loader.batch_size})
        batches: Iterator[Any] = iter(self._loader)
        for _ in range(0 if is_stateful else done):
            next(batches)
        RandomState().load_state_dict(self._random)
        self.done = done
        return batches


class RecipeRun:
    """Saves the state of a recipe while it trains. Replaces `train` and `save_checkpoint` of this recipe."""

    def __init__(self, recipe: Any, settings: Settings) -> None:
        if hasattr(recipe, "_ckpt_run"):
            raise InvalidArgument(
                f"{type(recipe).__name__} has two checkpointers of ckpt: take torchtune's own for the model that is not trained"
            )
        self._recipe, self._settings = recipe, settings
        self._saver: Checkpointer | None = None
        self._reported_step = -1
        self._train = recipe.train
        self._client = getattr(recipe, "_checkpoint_client", recipe)
        self._save_files = self._client.save_checkpoint
        recipe._ckpt_run, recipe.train, self._client.save_checkpoint = self, self.train, self.end_epoch

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Resume from the newest step, train, and wait for the saves."""
        recipe = self._recipe
        if missing := [name for name in _PARTS if not hasattr(recipe, name)]:
            raise InvalidArgument(
                f"{type(recipe).__name__} has no {missing[0]}, as torchtune's fine-tuning recipes have: ckpt can't save it; "
                "use torchtune's own checkpointer"
            )
        self._batches = recipe._dataloader = Batches(recipe, self)
        self._state = self._entries()
        with Checkpointer(self._settings.url, every=self._settings.every, keep=self._settings.keep) as self._saver:
            if self._settings.resume:
                _, start = self._saver.restore(self._state)
                if start:
                    self._reported_step = start - 1
                    self._batches.note_random()
                    log.warning("%s continues from step %d of %s", type(recipe).__name__, start - 1, self._settings.url)
            return self._train(*args, **kwargs)

    def _entries(self) -> dict[str, Any]:
        recipe = self._recipe
        wrapper = getattr(recipe, "_optim_ckpt_wrapper", None)  # of the optimizers that step in the backward pass
        optimizer = recipe._optimizer if wrapper is None else list(wrapper.optim_map.values())
        found: dict[str, Any] = {
            "train": TrainedState(recipe._model, optimizer),
            "progress": Progress(recipe, self._batches),
            "random": RandomState(),
        }
        if recipe._lr_scheduler is not None:
            found["schedule"] = Schedule(recipe._lr_scheduler)
        return found

    def batch_done(self) -> None:
        """Save if a step of the optimizer is done, and a save is due or it is the last step of the epoch."""
        if self._batches.done % self._recipe._gradient_accumulation_steps == 0:
            self._step(self._batches.done == self._batches.last())

    def end_epoch(self, *args: Any, epoch: int, **kwargs: Any) -> None:
        """Save the end of an epoch, and write the files of the model after the last one, as the recipe does."""
        if self._batches.done == self._batches.last():  # otherwise the last step of the optimizer was before the last batch
            self._step(True)
        if epoch + 1 >= self._recipe.total_epochs:
            self._save_files(*args, epoch=epoch, **kwargs)

    def _step(self, is_last: bool) -> None:
        """Report a step of the optimizer that is done, and save it if that is due, or if it is the last one of an epoch."""
        step, saver = self._recipe.global_step - 1, self._saver
        if saver is None or step <= self._reported_step:
            return
        self._reported_step = step
        if saver.step(step, self._state) is None and is_last:
            saver.save(step, self._state)
