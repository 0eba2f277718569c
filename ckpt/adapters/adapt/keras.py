"""`Model.fit` of Keras under `ckpt-run --adapt`: it gets the callback `Checkpoints`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from ckpt.adapters.adapt.intervals import KEEP, describe, interval_from_env
from ckpt.adapters.adapt.start_text import describe_start
from ckpt.adapters.adapt.startup import hooks
from ckpt.adapters.keras import Checkpoints

_NAME = "keras.Model"


def fit(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `original`, the method `Model.fit`, with a callback that saves to the repository of this training run."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):  # Keras gives it no model, no number of epochs and no number of steps
        hooks.print_refused(_NAME, "its callbacks are a CallbackList: give fit a list of callbacks to save to ckpt")
        return original(*args, **kwargs)
    callbacks = list(keras.tree.flatten(given)) if given else []
    if any(isinstance(callback, Checkpoints) for callback in callbacks):
        return original(*args, **kwargs)
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        hooks.print_refused(_NAME, "the callback BackupAndRestore already resumes this fit: remove it to save to ckpt")
        return original(*args, **kwargs)
    with hooks.training(_NAME) as url:
        if url is None:
            return original(*args, **kwargs)
        every = interval_from_env()
        callbacks.append(Checkpoints(url, every=every, keep=KEEP))
        bound.arguments["callbacks"] = callbacks
        hooks.print_saves(_NAME, url, describe(every), describe_start(url))
        return original(*bound.args, **bound.kwargs)
