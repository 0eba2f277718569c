"""A program that ends with several failed saves logs them in the order of the saves."""

from __future__ import annotations

import random
from pathlib import Path

from ckpt.groups.base import SingleProcessGroup
from ckpt.repository.repository import open_repository
from ckpt.saving.handle import SaveHandle
from ckpt.saving.session_start import start_alone
from ckpt.saving.writer_session import Session
from ckpt.storage.base.errors import StoreError


def test_failures_are_listed_in_the_order_of_the_saves(tmp_path: Path) -> None:
    repository = open_repository(tmp_path)
    start = start_alone(repository, None, None)
    session = Session(repository, SingleProcessGroup(), start)
    handles = [SaveHandle(step) for step in range(40)]
    random.Random(0).shuffle(handles)  # a set would order them by their addresses
    for handle in handles:
        session.add_save(handle, len(handles))
        handle.end(None, StoreError(f"no space for step {handle.step}"))
    session.superseded_failure = handles[0]
    handles[0].supersede_error()
    assert session.unreported_failures() == handles
    start.lease.release()
