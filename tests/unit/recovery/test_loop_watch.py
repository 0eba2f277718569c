"""A loop without ticks for long hangs; the time in which the whole host was paused does not count."""

from __future__ import annotations

from ckpt.recovery.agent.loop_watch import HUNG_SECONDS, LoopWatch

LOOK_SECONDS = 0.5


def _look(watch: LoopWatch, begin: float, seconds: float) -> float:
    """Look twice a second for some seconds, and return how long the loop hangs then."""
    for i in range(int(seconds / LOOK_SECONDS)):
        hung = watch.hung_seconds(begin + i * LOOK_SECONDS)
    return hung


def test_a_loop_hangs_after_its_limit_until_it_ticks() -> None:
    watch = LoopWatch(100.0)
    assert _look(watch, 100.0, HUNG_SECONDS) == 0.0
    assert _look(watch, 100.0 + HUNG_SECONDS, 2.0) > HUNG_SECONDS
    watch.tick(102.0 + HUNG_SECONDS)
    assert _look(watch, 102.0 + HUNG_SECONDS, HUNG_SECONDS) == 0.0


def test_a_pause_of_the_host_is_no_hang() -> None:
    watch = LoopWatch(100.0)
    assert _look(watch, 100.0, 10.0) == 0.0
    assert watch.hung_seconds(5000.0) == 0.0
    assert _look(watch, 5000.0, HUNG_SECONDS - 12.0) == 0.0
    assert _look(watch, 5000.0 + HUNG_SECONDS - 12.0, 4.0) > HUNG_SECONDS


def test_a_loop_without_a_watch_never_hangs() -> None:
    watch = LoopWatch(100.0)
    watch.end()
    assert _look(watch, 100.0, 2 * HUNG_SECONDS) == 0.0
