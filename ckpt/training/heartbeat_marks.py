"""Marks in the heartbeat page: the phase of a rank, its compute time, an error that no restart fixes."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator

from ckpt.training import cuda_timer
from ckpt.training.heartbeat_page import PHASES, own_page
from ckpt.training.heartbeat_records import Trouble


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark work that is not a training step, so that `ckpt-run` applies the hang limit of that phase.

        with ckpt.pulse.phase("eval"):
            evaluate(model)

    name: "eval", "compile", "load" or "save". Without `ckpt-run` this does nothing.

    Raises:
        ValueError: Under `ckpt-run`, there is no such phase.
    """
    page = own_page()
    if page is None:
        yield
        return
    before = page.read().phase
    page.beat(PHASES.index(name))
    try:
        yield
    finally:
        page.beat(PHASES.index(before))


@contextlib.contextmanager
def compute() -> Iterator[None]:
    """Mark the work of a step that waits for no other rank, such as loading a batch, forward, and backward without collectives.

        with ckpt.pulse.compute():
            loss = model(batch).mean()

    The times show `ckpt-run` for which rank the others wait, where the steps of all ranks end together. Several marks in one
    step add up. If torch uses a CUDA device, the time on its current stream counts, and the device is not waited for. With jax,
    wait for the result inside the block. Without `ckpt-run` this does nothing.
    """
    page = own_page()
    if page is None:
        yield
        return
    began, device = time.monotonic_ns(), cuda_timer.begin()
    try:
        yield
    finally:
        if device is None:
            page.add_compute_ns(time.monotonic_ns() - began)
        else:
            page.add_compute_ns(cuda_timer.end(device))


@contextlib.contextmanager
def publish_trouble_on(trouble: Trouble, *kinds: type[Exception]) -> Iterator[None]:
    """Publish `trouble` if the block raises one of these errors, or an error caused by one: a restart would not fix it.

    An error with EIO does not count, because the storage server may be reachable again later.
    """
    try:
        yield
    except Exception as error:
        found = list(_causes(error))
        is_transient = any(getattr(cause, "errno", None) == errno.EIO for cause in found)
        if any(isinstance(cause, kinds) for cause in found) and not is_transient and (page := own_page()) is not None:
            page.publish_trouble(trouble)
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
