"""What rank 0 raises while it reads for all ranks is raised on every rank, and the others name rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.rank_threads import on_ranks

from ckpt.errors import GroupError, StepNotFound
from ckpt.groups.base import Group
from ckpt.loading.rank_agreement import broadcast_from_rank_0
from ckpt.repository.repository import Repository
from ckpt.saving.session_start import start_in_group
from ckpt.storage.base.errors import IntegrityError, StoreError, Unavailable
from ckpt.storage.local.directory import LocalStore

NAMED = "rank 0 of 3 failed, so no rank continues: "


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (KeyError("commit"), GroupError, NAMED + "KeyError: 'commit'"),
        (KeyboardInterrupt(), GroupError, NAMED + "KeyboardInterrupt"),
        (StoreError("no space"), StoreError, NAMED + "StoreError: no space"),
        (Unavailable("late"), StoreError, NAMED + "Unavailable: late"),
        (IntegrityError("commit.json is damaged"), IntegrityError, "commit.json is damaged"),
        (StepNotFound("no step 3"), StepNotFound, "no step 3"),
    ],
)
def test_a_failed_read_of_rank_0_is_raised_on_all_ranks(raised: BaseException, kind: type[Exception], text: str) -> None:
    def read() -> str:
        raise raised

    def work(group: Group) -> BaseException | str:
        try:
            return broadcast_from_rank_0(group, read)
        except BaseException as error:
            return error

    own, *others = on_ranks(3, work)
    assert own is raised
    assert [(isinstance(error, kind), str(error)) for error in others] == [(True, text)] * 2


@pytest.mark.parametrize(
    ("raised", "text"), [(KeyError("commit"), "KeyError: 'commit'"), (KeyboardInterrupt(), "KeyboardInterrupt")]
)
def test_a_save_that_rank_0_cannot_begin_names_its_error_on_all_ranks(tmp_path: Path, raised: BaseException, text: str) -> None:
    class Failing(Repository):
        def ensure(self) -> None:
            raise raised

    def work(group: Group) -> object:
        try:
            return start_in_group(Failing(LocalStore(tmp_path)), group, None, LocalStore(tmp_path), None, ())
        except BaseException as error:
            return error

    own, *others = on_ranks(3, work)
    assert own is raised
    assert [(type(error), str(error)) for error in others] == [(GroupError, f"rank 0 could not begin to save: {text}")] * 2
