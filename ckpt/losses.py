"""Watches the losses of a rank, and says in its page which is the first that is bad. Waits for no device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt.pulse import Bad, Pulse
from ckpt.spikes import Spikes
from ckpt.storage.errors import InvalidArgument

_MOST_LATE = 64
"""So many losses may be on their way from a device; then the oldest is waited for."""


@dataclass(frozen=True, slots=True)
class _Late:
    """A loss that a device still computes."""

    step: int
    batch: int
    ready: Callable[[], bool]
    value: Callable[[], float]
    """Waits for it."""


class Losses:
    """Of one rank. A loss on the host is looked at once it is given; one on a device when it is there, a step later or so."""

    def __init__(self, pulse: Pulse, spikes: Spikes | None) -> None:
        self._pulse = pulse
        self._spikes = spikes
        self._late: deque[_Late] = deque()
        self.bad: Bad | None = None
        """The first bad one: nothing is worth saving from there on."""

    @property
    def calm(self) -> bool:
        """Whether a finite loss on the host needs no look."""
        return self._spikes is None and not self._late

    def give(self, step: int, loss: Any) -> None:
        """The loss of a step: a number, or an array of one element."""
        if type(loss) is float:
            self._look(step, self._pulse.batch(), loss)
            return
        late = _late(step, self._pulse.batch(), loss)
        if late is None:
            self._look(step, self._pulse.batch(), as_number(loss))
            return
        self._late.append(late)
        while self._late and (len(self._late) > _MOST_LATE or self._late[0].ready()):
            self._take()

    def wait(self) -> None:
        """Until all that was given has been looked at."""
        while self._late:
            self._take()

    def _take(self) -> None:
        late = self._late.popleft()
        self._look(late.step, late.batch, late.value())

    def _look(self, step: int, batch: int, loss: float) -> None:
        self._pulse.loss(loss)
        if self.bad is not None:
            return
        if not math.isfinite(loss):
            self.bad = Bad(step, "not finite", loss, math.inf, batch)
        elif self._spikes is not None and self._spikes.see(loss):
            self.bad = Bad(step, "spike", loss, self._spikes.limit(), batch)
        if self.bad is not None:
            self._pulse.bad(self.bad)


def as_number(loss: Any) -> float:
    """Waits for a device; raise InvalidArgument for what is no number. Not float(): torch warns where there is a gradient."""
    try:
        return float(loss.item() if hasattr(loss, "item") else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _elements(loss) == 1:
            raise  # of the device
        raise _no_number(loss) from error


def _no_number(loss: Any) -> InvalidArgument:
    shape = getattr(loss, "shape", None)
    kind = type(loss).__name__ if shape is None else f"{type(loss).__name__} of shape {list(shape)}"
    return InvalidArgument(f"loss= is a {kind}, and must be a number or an array of one element: give its sum or mean")


def _elements(loss: Any) -> int:
    return math.prod(getattr(loss, "shape", ()))


def _late(step: int, batch: int, loss: Any) -> _Late | None:
    """How to read a loss that is not on the host; None where it is. `float` of it would wait for all that the device does."""
    if _elements(loss) != 1:
        raise _no_number(loss)
    if getattr(loss, "is_cuda", False):
        import torch

        host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        host.copy_(loss.detach().reshape(()), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def value() -> float:
            copied.synchronize()
            return as_number(host)

        return _Late(step, batch, copied.query, value)
    if hasattr(loss, "copy_to_host_async") and hasattr(loss, "is_ready"):  # jax
        loss.copy_to_host_async()
        return _Late(step, batch, loss.is_ready, lambda: as_number(loss))
    return None
