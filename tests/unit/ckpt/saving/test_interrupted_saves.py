"""An error in the thread that calls a save, at any moment after the attempt has begun, ends the attempt for all who wait."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from helpers.rank_threads import all_well, on_ranks, one_array

import ckpt
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.saving import pipeline, session_registry
from ckpt.saving.deferred_blocks import find_deferred_blocks
from ckpt.saving.save_run import SaveRun

_CALLERS = {
    function.__code__
    for function in (pipeline.save_after_failure, SaveRun.run_blocking, SaveRun.run_in_background, find_deferred_blocks)
}


class Interrupted(BaseException):
    """An error as a signal handler raises it, here in the thread of one rank."""


class Interrupter:
    """Raises Interrupted at the n-th call that the functions of `_CALLERS` make after the attempt has begun.

    Python also calls signal handlers when a function starts.
    """

    def __init__(self, number: int) -> None:
        self.calls_left = number
        self.place = ""
        """The function in which the error was raised; "" if there were fewer calls."""

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        caller = frame.f_back
        if self.place or caller is None or caller.f_code not in _CALLERS:
            return
        if caller.f_code is pipeline.save_after_failure.__code__ and "attempt" not in caller.f_locals:
            return
        if frame.f_globals["__name__"] in ("weakref", "_weakrefset"):  # a callback, in which Python swallows errors
            return
        if not self.calls_left:
            self.place = f"{caller.f_code.co_name} → {frame.f_code.co_qualname}"
            raise Interrupted(self.place)
        self.calls_left -= 1


def until_uninterrupted(attempt: Callable[[int, Interrupter], None]) -> list[str]:
    """Call `attempt` with 0, 1 …, interrupted one call later each time, until nothing is interrupted; return the places."""
    places: list[str] = []
    while True:
        interrupter = Interrupter(len(places))
        attempt(len(places), interrupter)
        if not interrupter.place:
            return places
        places.append(interrupter.place)


@pytest.mark.parametrize("blocking", [True, False])
def test_other_ranks_do_not_wait_for_a_rank_that_is_interrupted_anywhere_in_a_save(tmp_path: Path, blocking: bool) -> None:
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g), groups))

    def attempt(number: int, interrupter: Interrupter) -> None:
        def work(group: Group) -> BaseException | None:
            state = one_array(number)
            if group.rank == 0:
                handle = ckpt.save(state, tmp_path, number + 1, blocking=False, group=group, timeout=300)
                assert handle.wait(600)
                return handle.take_error()
            try:
                with interrupter:
                    ckpt.save(state, tmp_path, number + 1, blocking=blocking, group=group, timeout=300)
            except Interrupted as error:
                return error
            return None

        error = all_well_or_refused(on_ranks(2, work, groups))
        assert not isinstance(error, ckpt.RanksMissing), interrupter.place
        for session in session_registry._sessions.values():
            for handle in session._pending_saves if session.repo.url.endswith(str(tmp_path)) else ():
                assert handle.wait(300), interrupter.place

    def all_well_or_refused(found: list[Any]) -> Any:
        if isinstance(found[0], ckpt.StepRefused):
            assert "rank 1 failed" in str(found[0])
            assert isinstance(found[1], Interrupted)
            return found[0]
        return all_well(found)[0]

    places = until_uninterrupted(attempt)
    assert any("WorkerThread" in place for place in places)
    assert blocking or any("find_deferred_blocks" in place for place in places)
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(9), tmp_path, 999, group=g), groups))


@pytest.mark.parametrize("blocking", [True, False])
def test_the_next_save_does_not_wait_for_one_that_was_interrupted(tmp_path: Path, blocking: bool) -> None:
    with ckpt.Checkpointer(tmp_path, every=None) as saver:

        def attempt(number: int, interrupter: Interrupter) -> None:
            with suppress(Interrupted), interrupter:
                saver.save(number, one_array(number), blocking=blocking)
            assert saver.save(1000 + number, one_array(number)).wait(300), interrupter.place

        places = until_uninterrupted(attempt)
    saved = set(ckpt.open(tmp_path).steps())
    assert saved >= {len(places), *range(1000, 1001 + len(places))}
