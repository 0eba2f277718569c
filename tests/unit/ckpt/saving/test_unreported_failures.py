"""A program that ends with several failed saves logs them in the order of the saves."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from helpers.failing_store import failing
from helpers.states import state_of

import ckpt
from ckpt.groups.base import SingleProcessGroup
from ckpt.repository.repository import open_repository
from ckpt.saving.handle import SaveHandle
from ckpt.saving.session_start import start_alone
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import StoreError


def test_failures_are_listed_in_the_order_of_the_saves(tmp_path: Path) -> None:
    repository = open_repository(tmp_path)
    start = start_alone(repository, None, None)
    session = WriterSession(repository, SingleProcessGroup(), start)
    handles = [SaveHandle(step) for step in range(40)]
    random.Random(0).shuffle(handles)  # a set would order them by their addresses
    for handle in handles:
        session.add_save(handle, len(handles))
        handle.end(None, StoreError(f"no space for step {handle.step}"))
    session.superseded_failure = handles[0]
    handles[0].supersede_error()
    assert session.unreported_failures() == handles
    start.lease.release()


class FailsAfterALook(SaveHandle):
    """A save that fails right after a look at whether it has ended."""

    def done(self) -> bool:
        found = super().done()
        if not found:
            self.end(None, StoreError("no space"))
        return found


def test_a_save_that_fails_during_a_look_at_all_saves_is_reported(tmp_path: Path) -> None:
    repository = open_repository(tmp_path)
    start = start_alone(repository, None, None)
    session = WriterSession(repository, SingleProcessGroup(), start)
    session.add_save(FailsAfterALook(7), 1)
    session.raise_failed()
    with pytest.raises(ckpt.SaveFailed, match="saving step 7"):
        session.raise_failed()
    start.lease.release()


def test_each_failed_save_without_a_checkpointer_is_raised_by_a_later_save(tmp_path: Path) -> None:
    with failing("save.append=sleep:0.2@*,save.commit=error@*"):
        handles = [ckpt.save(state_of(step), tmp_path, step, blocking=False) for step in (1, 2)]
        for handle in handles:
            handle.wait()
    for step in (1, 2):
        with pytest.raises(ckpt.SaveFailed, match=f"saving step {step}"):
            ckpt.save(state_of(3), tmp_path, 3)
    ckpt.save(state_of(3), tmp_path, 3)
    assert ckpt.open(tmp_path).steps() == [3]
