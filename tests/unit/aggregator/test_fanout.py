"""Calls to many members at once: what counts as a failure of a member, and what does not."""

from __future__ import annotations

import threading

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.cluster.member_health import MemberHealth
from ckpt.storage.base.errors import StoreError, Unavailable


def test_a_member_whose_call_still_waits_for_a_thread_is_not_down() -> None:
    """The calls to members that hang use all threads. The member behind them was not asked."""
    health = MemberHealth()
    fan_out, is_over = FanOut(health, threads=6), threading.Event()
    try:
        hanging = {f"silent{n}": is_over.wait for n in range(6)}
        _, errors = fan_out.ask({**hanging, "healthy": lambda: True}, 0.2)
        assert {name for name in [*hanging, "healthy"] if health.is_down(name)} == {*hanging}
        assert isinstance(errors["healthy"], Unavailable)
    finally:
        is_over.set()
        fan_out.close()


def test_an_error_of_the_system_in_the_call_to_one_member_leaves_the_answers_of_the_others() -> None:
    def fail() -> int:
        raise ConnectionResetError("connection reset by peer")

    fan_out = FanOut(MemberHealth())
    try:
        answers, errors = fan_out.ask({"broken": fail, "healthy": lambda: 1}, 300.0)
    finally:
        fan_out.close()
    assert answers == {"healthy": 1}
    assert isinstance(errors["broken"], StoreError)
    assert "connection reset by peer" in str(errors["broken"])
