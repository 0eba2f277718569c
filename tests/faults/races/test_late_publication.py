"""A save, or a copy of one, whose publication got no answer, or that was fenced after it.

Its files are deleted only if no step can need them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.failing_store import Injected
from helpers.rank_threads import all_well, on_ranks
from helpers.states import state_of
from helpers.two_writers import take_over
from obstore.store import MemoryStore

import ckpt
from ckpt.groups.threads import ThreadGroup
from ckpt.repository import commit_publication
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.storage.base.store import Buffer, Version
from ckpt.storage.remote.object_store import ObjectStore


class LateBucket(ObjectStore):
    """A bucket in memory that answers the publication of a step too late. `arrive` lets the request take effect."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = MemoryStore()
        self.late_name = ""
        self.arrive: Callable[[], Version | None] | None = None
        self.may_give_up = threading.Event()
        """Until this is set, the writer of the late request waits for the answer."""
        self.may_give_up.set()

    def _compare_and_swap(self, name: str, data: Buffer, expected: Version | None) -> Version | None:
        put = super()._compare_and_swap
        if name == self.late_name and expected is not None and len(bytes(data)) > 100:  # the record, and no reservation
            self.late_name, self.arrive = "", lambda: put(name, data, expected)
            assert self.may_give_up.wait(600)
            raise Injected(f"no answer to the request for {name}")
        return put(name, data, expected)


def test_a_record_that_arrives_late_does_not_commit_deleted_files() -> None:
    bucket = LateBucket("memory://late/run")
    with ckpt.Checkpointer(bucket) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(0, state_of(0), blocking=True)
        bucket.late_name = commit_name(1)
        with pytest.raises(ckpt.CkptError, match="no answer"):
            checkpointer.save(1, state_of(1), blocking=True)
        assert not any("steps/1/pack" in entry.name for entry in bucket.list())
        assert bucket.arrive is not None
        assert bucket.arrive() is None, "the publication was revoked"
        checkpointer.save(2, state_of(2), blocking=True)
    assert Repository(bucket).steps() == [0, 2]
    ckpt.load(bucket)  # type: ignore[arg-type]


def test_a_record_that_arrives_late_over_an_older_one_commits_files_of_all_ranks() -> None:
    """The step exists and is saved again: no store can revoke the late request, so no rank deletes its files."""
    bucket = LateBucket("memory://late/again")
    groups = ThreadGroup.make(2)

    def save(number: int) -> list[Any]:
        state = lambda rank: {"w": ckpt.Shard(np.full(5, number), (10,), (5 * rank,)), "n": number}  # noqa: E731
        return on_ranks(2, lambda g: ckpt.save(state(g.rank), bucket, 1, group=g, overwrite=True, timeout=20), groups)  # type: ignore[call-overload]

    all_well(save(1))
    bucket.late_name = commit_name(1)
    failed = save(2)
    assert isinstance(failed[0], ckpt.CkptError)
    assert isinstance(failed[1], ckpt.StepRefused)
    assert failed[1].may_be_committed
    assert bucket.arrive is not None
    assert bucket.arrive() is not None, "the request takes effect"
    assert ckpt.load(bucket, group=None, strict=True)["n"] == 2  # type: ignore[call-overload]


def test_a_fenced_writer_keeps_files_to_which_a_newer_step_may_refer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It committed its step. Then a newer writer saved a step that refers to its pack, and deleted its step by `keep`."""
    ckpt.save(state_of(0), tmp_path, 0)

    def stop(point: str) -> None:
        if point == "save.published":
            take_over(tmp_path, 9)
            (tmp_path / commit_name(1)).unlink()

    monkeypatch.setattr(commit_publication, "failpoint", stop)
    with pytest.raises(ckpt.Fenced):
        ckpt.save(state_of(1), tmp_path, 1)
    assert list((tmp_path / "steps/1/pack").iterdir())


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_a_copied_record_that_arrives_late_does_not_commit_deleted_files(tmp_path: Path, is_saved_again: bool) -> None:
    """The copy of a step gets no answer, and a newer step is copied instead."""
    bucket = LateBucket(f"memory://late/{is_saved_again}")
    with ckpt.Checkpointer(bucket, every=1, tiers=[ckpt.Tier(tmp_path, every=1, keep=5)]) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(1 if is_saved_again else 0, state_of(0), blocking=True)
        checkpointer.wait()
        bucket.late_name = commit_name(1)
        bucket.may_give_up.clear()
        checkpointer.save(1, state_of(1), blocking=True)
        checkpointer.save(2, state_of(2), blocking=True)
        bucket.may_give_up.set()
        checkpointer.wait()
        assert bucket.arrive is not None
        assert (bucket.arrive() is not None) == is_saved_again, "only a request that replaces a record can't be revoked"
    repo = Repository(bucket)
    assert repo.steps() == ([1, 2] if is_saved_again else [0, 2])
    names = {entry.name for entry in bucket.list()}
    assert {name for step in repo.steps() for name in repo.commit(step).files()} <= names
    assert any("steps/1/pack" in name for name in names) == is_saved_again
