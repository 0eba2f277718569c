"""Which signals count as a second request, after which the ranks are ended without a save."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from ckpt.recovery.ranks.signals import END_SIGNALS, Signals


@pytest.fixture(autouse=True)
def handlers_of_this_process() -> Iterator[None]:
    """Undo that signals are ignored after the first one."""
    handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("sent", "count"),
    [
        # A closed terminal: its shell and the kernel each send one.
        ([signal.SIGHUP, signal.SIGHUP], 1),
        # systemd with SendSIGHUP=yes, as at the end of a login.
        ([signal.SIGTERM, signal.SIGHUP], 1),
        ([signal.SIGINT, signal.SIGINT], 2),
        ([signal.SIGHUP, signal.SIGTERM], 2),
    ],
)
def test_a_hangup_that_follows_another_signal_is_no_second_request(sent: list[signal.Signals], count: int) -> None:
    signals = Signals()
    with closing(selectors.DefaultSelector()) as select, signals.installed(select):
        for number in sent:
            os.kill(os.getpid(), number)
            select.select(1.0)
    assert (signals.first, signals.count) == (sent[0], count)
