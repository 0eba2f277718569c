"""The hedged read of copies: if one copy is slow, the next one is read at the same time, and the first that arrives is used."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait

from ckpt.aggregator.file_io.fragment_reader import FragmentReader
from ckpt.aggregator.records.file_record import Stripe
from ckpt.storage.base.errors import StoreError


def read_any_copy(fragments: FragmentReader, stripe: Stripe, first: int, last: int, out: memoryview) -> None:
    """Read one of the copies into `out`. If that fails, read the next one. If it is slow, read the next one at the same time.

    The first read writes into `out` itself, and later ones into memory of their own.
    """
    copies = fragments.reading_order(stripe)
    if len(copies) < 2:
        errors: dict[int, StoreError] = {}
        for copy in copies:
            try:
                fragments.read(stripe, copy, first, last, out, stripe.nbytes)
                return
            except StoreError as error:
                errors[copy] = error
        raise fragments.unreadable_error(stripe, errors)
    failed: dict[int, StoreError] = {}
    running: dict[Future[None], tuple[int, memoryview]] = {}
    first_view: memoryview | None = None
    until = time.monotonic() + fragments.member_io.read_timeout_seconds
    try:
        while True:
            if copies:
                copy = copies.pop(0)
                view = memoryview(bytearray(last - first)) if running else out[:]
                if not running:
                    first_view = view
                call = functools.partial(fragments.read, stripe, copy, first, last, view, stripe.nbytes)
                running[fragments.member_io.read_fan_out.submit(fragments.member_of(stripe, copy), call)] = copy, view
            timeout_seconds: float | None = max(0.0, until - time.monotonic())
            if any(view is first_view and fragments.is_on_this_host(stripe, c) for c, view in running.values()):
                timeout_seconds = None  # a system call that writes into the caller's memory can't be cancelled
            elif copies:
                timeout_seconds = min(timeout_seconds or 0.0, fragments.member_io.hedge_after_seconds)
            done, _ = wait(running, timeout_seconds, FIRST_COMPLETED)
            for future in done:
                copy, got = running.pop(future)
                try:
                    future.result()
                except StoreError as error:
                    failed[copy] = error
                    continue
                if got is not first_view:
                    assert first_view is not None
                    _revoke_view(first_view, running)
                    out[:] = got
                return
            if not copies and (not running or not done):
                raise fragments.unreadable_error(stripe, failed)
    finally:  # also after an interrupt: the caller may use the memory for something else then
        if first_view is not None:
            _revoke_view(first_view, running)


def _revoke_view(view: memoryview, running: Mapping[Future[None], tuple[int, memoryview]]) -> None:
    """Make sure that a slow thread does not write into the caller's memory any more.

    Data from a node is written through this view in several parts, and each part fails after its release. A thread that reads a
    file directly exports the view's buffer during the system call; wait for its end.
    """
    try:
        view.release()  # the next write of the thread fails
    except BufferError:  # a system call is writing into the view
        for future, (_, own_view) in running.items():
            if own_view is view:
                wait([future])
