"""The class LossMonitor, which publishes the first bad loss of a rank without waiting for a device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt.storage.base.errors import InvalidArgument
from ckpt.training.cuda_timer import MAX_PENDING
from ckpt.training.heartbeat_page import HeartbeatPage
from ckpt.training.heartbeat_records import BadLoss
from ckpt.training.loss_spikes import SpikeDetector


@dataclass(frozen=True, slots=True)
class _PendingLoss:
    """A loss that a device still computes."""

    step: int
    batch: int
    is_ready: Callable[[], bool]
    wait_for_value: Callable[[], float]
    """Waits for the device, and returns the loss."""


class LossMonitor:
    """Checks the losses of one rank: one on the host at once, one on a device when it is ready, about a step later.

    Only the thread that trains uses it.
    """

    def __init__(self, page: HeartbeatPage, spike_detector: SpikeDetector | None) -> None:
        self._heartbeat_page = page
        self._spike_detector = spike_detector
        self._pending: deque[_PendingLoss] = deque()
        self.bad_loss: BadLoss | None = None
        """The first bad loss. No step is saved from there on."""

    @property
    def can_skip_finite_losses(self) -> bool:
        """Whether a finite loss on the host needs no check."""
        return self._spike_detector is None and not self._pending

    def add(self, step: int, loss: Any) -> None:
        """Add the loss of a step, a number or an array of one element, and check all losses that are ready."""
        if type(loss) is float:
            self._check(step, self._heartbeat_page.last_batch(), loss)
            return
        pending = _pending_loss(step, self._heartbeat_page.last_batch(), loss)
        if pending is None:
            self._check(step, self._heartbeat_page.last_batch(), as_number(loss))
            return
        self._pending.append(pending)
        while self._pending and (len(self._pending) > MAX_PENDING or self._pending[0].is_ready()):
            self._check_oldest()

    def wait(self) -> None:
        """Wait until all losses have been checked."""
        while self._pending:
            self._check_oldest()

    def _check_oldest(self) -> None:
        late = self._pending.popleft()
        self._check(late.step, late.batch, late.wait_for_value())

    def _check(self, step: int, batch: int, loss: float) -> None:
        self._heartbeat_page.publish_loss(loss)
        if self.bad_loss is not None:
            return
        if not math.isfinite(loss):
            self.bad_loss = BadLoss(step, "not finite", loss, math.inf, batch)
        elif self._spike_detector is not None and self._spike_detector.observe(loss):
            self.bad_loss = BadLoss(step, "spike", loss, self._spike_detector.limit(), batch)
        if self.bad_loss is not None:
            self._heartbeat_page.publish_bad_loss(self.bad_loss)


def reason_not_to_save(monitor: LossMonitor | None, step: int, loss: Any) -> str | None:
    """Return why the state after a step is not saved, or None if it can be saved.

    monitor: has the losses up to this step; None without a heartbeat page, where only `loss` counts.
    """
    if monitor is None:
        number = 0.0 if loss is None else as_number(loss)
        return None if math.isfinite(number) else f"its loss is {number}"
    monitor.wait()
    if (bad := monitor.bad_loss) is None:
        return None
    whose = "its loss" if bad.step == step else f"the loss of step {bad.step}"
    return f"{whose} is {bad.loss}" if bad.kind == "not finite" else f"{whose} jumped to {bad.loss}"


def as_number(loss: Any) -> float:
    """Return the loss as a float, after waiting for its device; raise InvalidArgument if it is not a number.

    item() is called first, because float() of a torch tensor with a gradient warns.
    """
    try:
        return float(loss.item() if hasattr(loss, "item") else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _element_count(loss) == 1:
            raise  # an error of the device
        raise _not_a_number_error(loss) from error


def _not_a_number_error(loss: object) -> InvalidArgument:
    shape = getattr(loss, "shape", None)
    kind = type(loss).__name__ if shape is None else f"{type(loss).__name__} of shape {list(shape)}"
    return InvalidArgument(f"loss= is a {kind}, and must be a number or an array of one element: give its sum or mean")


def _element_count(loss: object) -> int:
    return math.prod(getattr(loss, "shape", ()))


def _pending_loss(step: int, batch: int, loss: Any) -> _PendingLoss | None:
    """Return how to read a loss that is on a device, or None if it is on the host.

    float() of it would wait for all work of the device. So the loss is copied asynchronously.
    """
    if _element_count(loss) != 1:
        raise _not_a_number_error(loss)
    if getattr(loss, "is_cuda", False):
        import torch

        host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        host.copy_(loss.detach().reshape(()), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def value() -> float:
            copied.synchronize()
            return as_number(host)

        return _PendingLoss(step, batch, copied.query, value)
    if hasattr(loss, "copy_to_host_async") and hasattr(loss, "is_ready"):  # jax
        loss.copy_to_host_async()
        return _PendingLoss(step, batch, loss.is_ready, lambda: as_number(loss))
    return None
