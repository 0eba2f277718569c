"""Several groups of one job save into one repository."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.rank_threads import all_well, lease_owner, on_ranks, one_array
from helpers.repositories import assert_clean

import ckpt
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.repository import writer_lease
from ckpt.storage.base.store import Buffer
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.durable_writer import temporary_name


def test_rank_0_may_save_for_itself_beside_the_group(tmp_path: Path) -> None:
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save({"a": np.ones(9)}, tmp_path, 0, group=g), groups))
    ckpt.save({"mine": 1}, tmp_path, 1, group=None)
    all_well(on_ranks(2, lambda g: ckpt.save({"a": np.ones(9)}, tmp_path, 1, group=g, overwrite=True), groups))
    assert ckpt.load(tmp_path, group=None)["a"].tolist() == [1] * 9


def test_ranks_do_not_take_the_commit_of_a_process_alone_for_their_own(tmp_path: Path) -> None:
    """Rank 0 has saved the step alone before, in the same generation; each is the first attempt of its kind at the step."""
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g), groups))
    ckpt.save({"mine": 1}, tmp_path, 1, group=None)
    found = all_well(on_ranks(2, lambda g: ckpt.save(one_array(1), tmp_path, 1, group=g, overwrite=True), groups))
    assert found[1].commit == found[0].commit
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(2), tmp_path, 2, group=g, timeout=300), groups))


class _Held(LocalStore):
    """A directory that, once it has the part of rank 1, gives the commit record of step 0 only after the gate is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.has_part = False

    def put(self, name: str, data: Buffer) -> None:
        self.has_part = self.has_part or "/part/1-" in name
        super().put(name, data)

    def get_up_to(self, name: str, limit: int) -> bytes:
        if self.has_part and name == "steps/0/commit.json":
            assert self.gate.wait(600)
        return super().get_up_to(name, limit)


def test_another_saver_deletes_no_step_whose_commit_a_rank_may_not_have_seen(tmp_path: Path) -> None:
    """Rank 0 saves alone right after the commit, and keeps one step."""
    store = _Held(tmp_path)

    def work(group: Group) -> ckpt.Checkpoint:
        saved = ckpt.save(one_array(0), store if group.rank else tmp_path, 0, group=group, timeout=300)
        if group.rank == 0:
            ckpt.save({"mine": 1}, tmp_path, 1, group=None, keep=1)
            store.gate.set()
        return saved

    first, second = all_well(on_ranks(2, work))
    assert second.commit == first.commit


@pytest.mark.slow
def test_groups_of_one_job_save_to_one_url_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example torch's default group and a mesh of the same ranks, COMM_WORLD and a duplicate, or a part of the ranks."""
    monkeypatch.setattr(writer_lease, "UNSEEN_SECONDS", 0.0)
    one, other, some = ThreadGroup.make(3), ThreadGroup.make(3), ThreadGroup.make(2)
    for step, groups in enumerate([one, other, some, one, some, other, one]):
        for blocking in (True, False):
            handles = all_well(on_ranks(len(groups), lambda g: ckpt.save(
                one_array(step), tmp_path, step, group=g, timeout=20, blocking=blocking, overwrite=not blocking,  # noqa: B023
            ), groups))  # fmt: skip
        for handle in handles:
            handle.result()
        assert ckpt.load(tmp_path, group=None)["a"].tolist() == [step] * 2000
    ckpt.save({"mine": 1}, tmp_path, 50, group=None)
    all_well(on_ranks(3, lambda g: ckpt.save(one_array(9), tmp_path, 51, group=g, keep=2), other))
    assert ckpt.open(tmp_path).steps() == [50, 51]


@pytest.mark.parametrize("written", [False, True])
def test_a_group_saves_beside_what_its_rank_0_saves_alone(tmp_path: Path, written: bool) -> None:
    groups = ThreadGroup.make(2)
    (tmp_path / "steps").mkdir()
    Path(temporary_name(f"{tmp_path}/steps/x")).write_bytes(b"of a killed writer")
    with ckpt.Checkpointer(tmp_path, every=None, group=None) as alone:
        if written:
            alone.save(0, one_array(0))
        for step in range(1, 9, 2):
            handle = alone.save(step, one_array(step))
            all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, step + 1, group=g, timeout=20), groups))  # noqa: B023
            handle.result()
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(9), tmp_path, 9, group=g, timeout=20), groups))
    assert ckpt.open(tmp_path).steps() == list(range(1 - written, 10))
    assert {c.commit.generation for c in ckpt.open(tmp_path)} == {1}
    assert_clean(tmp_path)


def test_a_save_through_a_group_does_not_count_as_an_older_run(tmp_path: Path) -> None:
    """Where both save in the background, either may commit first."""
    groups = ThreadGroup.make(2)
    with ckpt.Checkpointer(tmp_path, every=None, group=None) as alone:
        all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 2, group=g, timeout=20), groups))
        alone.save(1, one_array(1))
        alone.save(3, one_array(3))
    assert ckpt.open(tmp_path).steps() == [1, 2, 3]
    assert {c.commit.line for c in ckpt.open(tmp_path)} == {0}


def test_a_group_may_save_before_its_rank_0_saves_alone(tmp_path: Path) -> None:
    groups = ThreadGroup.make(2)
    (tmp_path / "steps").mkdir()
    Path(temporary_name(f"{tmp_path}/steps/x")).write_bytes(b"of a killed writer")
    with ckpt.Checkpointer(tmp_path, every=None, group=None) as alone:
        all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g, timeout=20), groups))
        assert_clean(tmp_path)
        alone.save(1, one_array(1))
    assert ckpt.open(tmp_path).steps() == [0, 1]


def test_tiers_of_rank_0_alone_share_no_writer_lease_with_a_group(tmp_path: Path) -> None:
    """A copied step keeps its generation, which a later writer lease of the repository of record would use again."""
    groups, url = ThreadGroup.make(2), tmp_path / "record"
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), url, 0, group=g), groups))
    with ckpt.Checkpointer(url, every=None, tiers=[ckpt.Tier(tmp_path / "near")], group=None) as alone:
        alone.save(1, one_array(1))
    newest = max(int(file.name.partition(".")[0]) for file in (url / "generations").iterdir())
    assert {c.commit.generation for c in ckpt.open(url)} == {1, newest}


@pytest.mark.slow
def test_groups_save_to_one_url_at_the_same_time(tmp_path: Path) -> None:
    groups = [ThreadGroup.make(2), ThreadGroup.make(2)]

    def work(group: Group) -> None:
        handles = []
        for step in range(0, 40, 2):
            for which, ranks in enumerate(groups):
                handles.append(ckpt.save(one_array(step + which), tmp_path, step + which, group=ranks[group.rank],
                                         timeout=20, blocking=False))  # fmt: skip
        for handle in handles:
            handle.result()

    all_well(on_ranks(2, work))
    assert ckpt.open(tmp_path).steps() == list(range(40))
    for step in range(40):
        assert ckpt.load(tmp_path, step=step, group=None)["a"].tolist() == [step] * 2000
    assert_clean(tmp_path)


def test_a_step_that_one_group_gave_up_is_saved_by_another(tmp_path: Path) -> None:
    one, other = ThreadGroup.make(2), ThreadGroup.make(2)
    for groups in (one, other):
        all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g, overwrite=True), groups))
    bad = lambda g: ckpt.save({"a": object() if g.rank else 1}, tmp_path, 1, group=g, timeout=20)  # noqa: E731
    for groups in (one, other):
        assert all(isinstance(error, ckpt.CkptError) for error in on_ranks(2, bad, groups))
    for groups in (other, one):
        all_well(on_ranks(2, lambda g: ckpt.save(one_array(1), tmp_path, 1, group=g, overwrite=True), groups))
    assert ckpt.open(tmp_path).steps() == [0, 1]


def test_the_last_group_that_closes_releases_the_writer_lease(tmp_path: Path) -> None:
    one, other = ThreadGroup.make(2), ThreadGroup.make(2)
    savers = [all_well(on_ranks(2, lambda g: ckpt.Checkpointer(tmp_path, every=1, group=g), gs)) for gs in (one, other)]
    all_well(on_ranks(2, lambda g: savers[0][g.rank].close()))
    assert lease_owner(tmp_path) is not None
    all_well(on_ranks(2, lambda g: savers[1][g.rank].save(0, one_array(0)).result()))
    all_well(on_ranks(2, lambda g: ckpt.Checkpointer(tmp_path, every=1, group=g).close(), one))
    all_well(on_ranks(2, lambda g: savers[1][g.rank].save(1, one_array(1)).result()))
    all_well(on_ranks(2, lambda g: savers[1][g.rank].close()))
    assert lease_owner(tmp_path) is None


def test_a_group_that_this_process_has_superseded_is_fenced(tmp_path: Path) -> None:
    """Tiers continue the same numbers, so they share no writer lease. What the process saves alone uses the newest lease."""
    one, other = ThreadGroup.make(2), ThreadGroup.make(2)
    url, tier = tmp_path / "record", tmp_path / "tier"
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), url, 0, group=g), one))
    savers = all_well(on_ranks(2, lambda g: ckpt.Checkpointer(url, every=None, tiers=[ckpt.Tier(tier)], group=g), other))
    ckpt.save({"mine": 1}, url, 1, group=None)
    errors = on_ranks(2, lambda g: ckpt.save(one_array(2), url, 2, group=g, timeout=20), one)
    assert isinstance(errors[0], ckpt.Fenced)
    assert "this process has also begun" in str(errors[0])
    assert "one group" in str(errors[0])
    all_well(on_ranks(2, lambda g: savers[g.rank].close()))
    assert ckpt.open(url).steps() == [0, 1]
