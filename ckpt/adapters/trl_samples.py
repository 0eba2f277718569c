"""The generated samples that a trainer of TRL uses for several updates, as a part of the position in the data."""

from __future__ import annotations

import logging
from typing import Any

from ckpt.errors import UnsupportedLeaf
from ckpt.state.tree import PerRank, flatten
from ckpt.support.user_warning import warn_user

log = logging.getLogger("ckpt")


class GeneratedSamples:
    """The samples of GRPOTrainer, RLOOTrainer and trainers like them, and how many batches of them are used.

    trainer: a trainer that generates samples for several batches at once.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._are_left_out = False

    @staticmethod
    def exist_in(trainer: object) -> bool:
        """Return whether a trainer generates samples and keeps them for later batches."""
        return hasattr(trainer, "_buffered_inputs") and isinstance(getattr(trainer, "_step", None), int)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples of this rank; if they can't be stored, leave them out with a warning."""
        trainer = self._trainer
        found = {"step": trainer._step, "ranks": trainer.args.world_size}
        try:
            flatten({"samples": trainer._buffered_inputs})
        except UnsupportedLeaf as error:
            if not self._are_left_out:
                self._are_left_out = True
                warn_user(f"the generated samples are not saved, so a resumed run generates others: {error}"[:200])
            return found
        return found | {"samples": PerRank(trainer._buffered_inputs)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with the saved samples; generate new ones where there are none of this number of ranks."""
        trainer = self._trainer
        if state is None or "samples" not in state or state["ranks"] != trainer.args.world_size:
            log.warning(
                "the step has no generated samples for %d ranks: the next update uses new ones, so the losses may differ from "
                "those of a run without a restart",
                trainer.args.world_size,
            )
            trainer._buffered_inputs = None  # those of an earlier attempt in this process belong to other batches
            return
        samples = _on_device(state["samples"], trainer.accelerator.device)
        trainer._step, trainer._buffered_inputs = int(state["step"]), samples


def _on_device(value: Any, device: Any) -> Any:
    """Return loaded samples with their tensors on a device."""
    if type(value) is dict:
        return {key: _on_device(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_device(each, device) for each in value)
    return value.to(device) if hasattr(value, "to") else value
