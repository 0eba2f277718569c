"""`paddle.Model.fit` under `ckpt-run --adapt`: it gets the callback `Checkpoints`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import paddle

from ckpt.adapters.adapt.intervals import KEEP, describe, interval_from_env
from ckpt.adapters.adapt.start_text import describe_start
from ckpt.adapters.adapt.startup import hooks
from ckpt.adapters.paddle_fit import Checkpoints

_NAME = "paddle.Model"


def fit(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `original`, the method `Model.fit`, with a callback that saves to the repository of this training run."""
    if not paddle.in_dynamic_mode():
        hooks.print_refused(_NAME, "it runs in the static mode of Paddle: remove paddle.enable_static()")
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments.get("callbacks") or []
    with hooks.training(_NAME) as url:
        if url is None:
            return original(*args, **kwargs)
        every = interval_from_env()
        saving = Checkpoints(url, every=every, keep=KEEP)
        bound.arguments["callbacks"] = [*(given if isinstance(given, (list, tuple)) else [given]), saving]
        hooks.print_saves(_NAME, url, describe(every), describe_start(url))
        return original(*bound.args, **bound.kwargs)
