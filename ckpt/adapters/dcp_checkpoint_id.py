"""The checkpoint id of DCP, which is the number of a step."""

from __future__ import annotations

from ckpt.api import check_step
from ckpt.storage.base.errors import InvalidArgument


class StepAddressed:
    """Interprets the checkpoint id of DCP as the number of a step."""

    _step: int | None

    def reset(self, checkpoint_id: object = None) -> None:
        if checkpoint_id is not None:
            self._step = _step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return str(checkpoint_id).isdecimal()


def _step_of(checkpoint_id: object) -> int:
    """Return the number of the step; raise InvalidArgument if the id is not a number."""
    text = str(checkpoint_id)
    if not text.isdecimal():
        raise InvalidArgument(
            f"checkpoint_id={checkpoint_id!r}: give the number of a step, or none; the URL of the repository is an argument of "
            "Writer and Reader"
        )
    return check_step(int(text))
