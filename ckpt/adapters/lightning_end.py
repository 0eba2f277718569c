"""The end of a fit of a Lightning Trainer: whether a saved fit has ended, and which model the fits of this process trained."""

from __future__ import annotations

import weakref
from typing import Any

from ckpt.storage.base.errors import InvalidArgument


def limits(fit_loop: Any) -> list[int | None]:
    """Return the numbers of epochs and of optimizer steps at which a fit ends; callbacks may change them during the fit."""
    return [fit_loop.max_epochs, fit_loop.max_steps]


def was_stopped_early(checkpoint: dict[str, Any], fit_loop: Any) -> bool:
    """Return whether EarlyStopping had ended the saved fit. A fit with other limits is another one, which continues."""
    end = checkpoint["ckpt"].get("end", {})
    return bool(end.get("stopped_early")) and end["limits"] == limits(fit_loop)


def has_ended(checkpoint: dict[str, Any], fit_loop: Any) -> bool:
    """Return whether a fit that is resumed from a checkpoint would train nothing."""
    if was_stopped_early(checkpoint, fit_loop):
        return True
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    return _is_reached(epochs, fit_loop.max_epochs) or _is_reached(checkpoint["global_step"], fit_loop.max_steps)


def _is_reached(number: int, limit: int | None) -> bool:
    return limit is not None and -1 < limit <= number


_models: dict[str, weakref.ref[Any]] = {}
"""The model of the last fit that has ended in this process, by the URL of the repository.
No lock guards it, because entries are only added or replaced."""


def note_end(url: str, model: Any) -> None:
    """Note that a fit of a model has ended in this process."""
    _models[url] = weakref.ref(model)


def require_same_model(url: str, model: Any) -> None:
    """Raise InvalidArgument if the fit of another model has ended in this process, so that this model would not be trained."""
    if url in _models and _models[url]() is not model:
        raise InvalidArgument(
            f"a fit of another model with Checkpoints({url!r}) has ended in this process, and this model would not be trained: "
            "give each model a URL of its own"
        )
