"""What a step has of a Trainer besides its objects: its state as JSON, its position, and losses that are not logged yet."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from ckpt.adapters.transformers_best import BestModel
from ckpt.adapters.transformers_data import DataPosition
from ckpt.adapters.transformers_epochs import CAN_CHOOSE_POSITION, EpochEnd


def samples_in_batch(trainer: Any) -> int:
    """Return how many samples a Trainer takes at once: those of one batch of each process."""
    if trainer.accelerator.split_batches:
        return int(trainer._train_batch_size)
    return int(trainer.get_total_train_batch_size(trainer.args) // trainer.args.gradient_accumulation_steps)


class TrainerProgress:
    """The state of the Trainer as JSON, which rank 0 stores for all, and the position and losses of this rank."""

    def __init__(self, trainer: Any, data: DataPosition, best: BestModel, epoch_end: EpochEnd, text: str | None = None) -> None:
        self._trainer, self._data, self._best, self._epoch_end = trainer, data, best, epoch_end
        self.text = text
        self.best_step: int | None = None
        self.position: list[int] = []
        """The epoch that was saved, and how many batches of it this rank had taken."""
        self.batch_samples: int | None = None
        """How many samples one batch of each process had; None for a step of an earlier version."""
        self.is_before_epoch_end = False
        """Whether all batches of the epoch were done, but not its end."""
        self._losses: list[float] = []

    def target(self) -> TrainerProgress:
        """Return an object to load into."""
        return TrainerProgress(self._trainer, self._data, self._best, self._epoch_end, "")

    def copy_from(self, loaded: TrainerProgress) -> None:
        self._losses = loaded._losses

    def _callback_states(self) -> dict[str, Any]:
        """Return the states of callbacks, as `Trainer._save_checkpoint` collects them."""
        found: dict[str, list[Any]] = {}
        for callback in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states[0] if len(states) == 1 else states for name, states in found.items()}

    def _current_position(self) -> list[int]:
        """Return the epoch, and how many batches of it this rank has taken; the next epoch after the end of one."""
        epoch, batches, args = float(self._trainer.state.epoch or 0), self._data.batches, self._trainer.args
        if has_length(self._trainer.train_dataset):
            if self._is_before_epoch_end():
                return [int(epoch) - 1, batches]
            return [int(epoch), 0 if epoch.is_integer() else batches]
        # Trainer takes all batches of the training run for one pass, so an end in the first pass is epoch 1.0.
        passes = max(0, round(epoch - batches / (args.max_steps * args.gradient_accumulation_steps)))
        is_pass_done = self._data.is_at_end and self._epoch_end.has_passed and CAN_CHOOSE_POSITION
        return [passes + 1, 0] if is_pass_done else [passes, batches]

    def _is_before_epoch_end(self) -> bool:
        epoch = float(self._trainer.state.epoch or 0)
        is_last_batch = epoch > 0 and epoch.is_integer() and has_length(self._trainer.train_dataset)
        return is_last_batch and not self._epoch_end.has_passed

    def state_dict(self) -> dict[str, Any]:
        if self.text is not None:
            return {
                "json": self.text, "losses": [], "position": [], "batch_samples": None, "best_step": None,
                "is_before_epoch_end": None,
            }  # fmt: skip
        trainer = self._trainer
        pending = getattr(trainer, "_tr_loss", None)
        losses = [] if pending is None else [float(pending), int(trainer._globalstep_last_logged)]
        state = {
            "losses": losses, "position": self._current_position(), "batch_samples": samples_in_batch(trainer),
            "best_step": self._best.step, "is_before_epoch_end": self._is_before_epoch_end(),
        }  # fmt: skip
        if trainer.args.process_index:
            return state
        trainer.state.stateful_callbacks = self._callback_states()
        own = asdict(trainer.state) | {"best_model_checkpoint": None}  # the Trainer would look for a folder of this name
        return state | {"json": json.dumps(own, default=float)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text, self._losses = str(state["json"]), list(state["losses"])
        self.position = [int(number) for number in state.get("position", [])]
        is_before_epoch_end = state.get("is_before_epoch_end")
        self.is_before_epoch_end = bool(is_before_epoch_end)
        if is_before_epoch_end is None and self.position[1:] == [0] and not has_length(self._trainer.train_dataset):
            self.position = []  # earlier versions took the end of a training run for that of a pass
        self.batch_samples = state.get("batch_samples")
        self.best_step = state["best_step"] if "best_step" in state else json.loads(self.text).get("best_global_step")

    def restore_losses(self) -> None:
        if self._losses and hasattr(self._trainer, "_tr_loss"):
            self._trainer._tr_loss += self._losses[0]
            self._trainer._total_loss_scalar -= self._losses[0]  # the average of this call has only the steps of this call
            self._trainer._globalstep_last_logged = self._losses[1]
        self._losses = []
