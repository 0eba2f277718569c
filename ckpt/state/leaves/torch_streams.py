"""Streams and page-locked memory of CUDA for `ckpt.state.leaves.torch`. No function here synchronises a whole device."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from ckpt.state.leaves.shared_objects import shared_object

_thread_local = threading.local()


class StartedKernels:
    """The kernels that the caller's stream of a device had when the leaves of a state were made.

    Copies from and to these leaves wait for them, and for no later ones. The leaves of one state share an event, because one
    event for each would take longer than the copies of small leaves.
    """

    __slots__ = ("_device", "event")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event = torch.cuda.Event()
        self.leaves_are_made()

    def leaves_are_made(self) -> None:
        """Record the event again, after kernels that were started while the leaves were made."""
        self.event.record(torch.cuda.current_stream(self._device))

    def precede_current_stream(self) -> None:
        """Let the current stream of this thread wait for the kernels. The thread itself does not wait."""
        if getattr(_thread_local, "waited_for", None) is not self:
            torch.cuda.current_stream(self._device).wait_event(self.event)
            _thread_local.waited_for = self


def started_kernels(value: torch.Tensor) -> StartedKernels | None:
    """Return the kernels that copies of a tensor wait for; None for a tensor that is not on CUDA."""
    device = value.device
    return shared_object(device, lambda: StartedKernels(device)) if device.type == "cuda" else None


@contextmanager
def on_side_stream(device: torch.device, before: Iterable[StartedKernels | None]) -> Iterator[torch.cuda.Stream | None]:
    """Run reads of a device's tensors on a separate stream, after these kernels, while the training step's kernels run.

    Yields the stream, or None for a device that is not CUDA.
    """
    started = {kernels for kernels in before if kernels is not None}
    if not started:
        yield None
        return
    stream = _side_stream(device)
    for kernels in started:
        stream.wait_event(kernels.event)
    with torch.cuda.stream(stream):
        yield stream


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of this thread for a device, so that copies run while the training step's kernels run."""
    streams = _thread_local.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    stream: torch.cuda.Stream = streams[device]
    return stream


def pin(memory: np.ndarray[Any, Any], device: torch.device) -> bool:
    """Page-lock host memory so that copies from CUDA are asynchronous; return whether it succeeded.

    device: the device of the copies. In a new thread, device 0 is current, and a call there would allocate a context on it.
    """
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
            return True
        _clear_last_error(device)
        return False


def unpin(memory: np.ndarray[Any, Any], device: torch.device) -> None:
    """Undo `pin`; call it before the memory is freed."""
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)) != 0:
            _clear_last_error(device)


def _clear_last_error(device: torch.device) -> None:
    """Clear the error that CUDA keeps for this thread; otherwise the next kernel of the training would raise it."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).zero_()
