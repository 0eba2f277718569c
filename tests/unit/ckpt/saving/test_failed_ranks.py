"""When one rank fails or is missing, the others get its error, and the job continues."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import finish, python
from helpers.rank_threads import all_well, on_ranks, one_array, refused

import ckpt
from ckpt.format import json_records
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.saving.failure_reports import read_failure
from ckpt.storage.local.directory import LocalStore


class Broken:
    """A leaf whose state_dict() and load_state_dict() raise `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def state_dict(self) -> Any:
        raise self.error

    def load_state_dict(self, state: Any) -> None:
        raise self.error


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("out of range"), KeyboardInterrupt()])
def test_other_ranks_get_the_failed_rank_and_step(tmp_path: Path, broken: int, error: BaseException) -> None:
    def save(group: Group) -> Any:
        try:
            return ckpt.save({"m": Broken(error)} if group.rank == broken else {"m": np.arange(5)}, tmp_path, 7, group=group)
        except BaseException as raised:
            return raised

    found = on_ranks(3, save)
    for rank, received in enumerate(found):
        if rank != broken:
            assert isinstance(received, ckpt.StepRefused)
            assert str(received).startswith(f"step 7 is given up because rank {broken} failed: ")
            assert (str(error) or "KeyboardInterrupt") in str(received)


def test_an_unsupported_leaf_of_one_rank_refuses_the_step_on_all_ranks(tmp_path: Path) -> None:
    errors = refused(tmp_path, lambda rank: {"a": np.zeros(3), "b": (lambda: 0) if rank else 0})
    assert isinstance(errors[1], ckpt.UnsupportedLeaf)
    assert isinstance(errors[0], ckpt.StepRefused)
    assert "rank 1 failed" in str(errors[0])
    assert "leaf b" in str(errors[0])


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    groups = ThreadGroup.make(4)

    def work(group: Group) -> Any:
        ckpt.save({"a": np.arange(50)}, tmp_path, 0, group=group)
        if group.rank in (1, 3):
            return None
        return ckpt.save({"a": np.arange(50)}, tmp_path, 1, group=group, timeout=0.5)

    found = on_ranks(4, work, groups)
    assert isinstance(found[0], ckpt.RanksMissing)
    assert "ranks 1, 3 of 4" in str(found[0])
    assert "step 1" in str(found[0])
    assert isinstance(found[2], ckpt.RanksMissing), "the same error as on rank 0, so that all choose the next tier or none"
    assert "ranks 1, 3 of 4" in str(found[2])
    left = [path.name for path in (tmp_path / "steps/1").rglob("*-*")]
    assert all(name.endswith("-failed.json") for name in left), left
    assert ckpt.open(tmp_path).steps() == [0]
    all_well(on_ranks(4, lambda g: ckpt.save({"a": np.arange(50)}, tmp_path, 2, group=g), groups))


@pytest.mark.slow
def test_a_missing_rank_does_not_block_training(tmp_path: Path) -> None:
    """The committer waits in the background; the loop continues and gets the error at the next save."""
    groups = ThreadGroup.make(2)

    def work(group: Group) -> Any:
        saver = ckpt.Checkpointer(tmp_path, every=None, group=group, timeout=0.5)
        saver.save(0, {"a": np.zeros(10)}).result()
        if group.rank == 1:
            return None
        handle = saver.save(1, {"a": np.zeros(10)})
        assert not handle.done()
        handle.wait()
        with pytest.raises(ckpt.SaveFailed, match=r"saving step 1 .* rank 1 of 2 did not write its part"):
            saver.save(2, {"a": np.zeros(10)})
        with pytest.raises(ckpt.SaveFailed, match="saving step 2"):
            saver.close()
        return "raised"

    assert on_ranks(2, work, groups) == ["raised", None]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_a_rank_that_has_ended_its_saves_is_not_waited_for(tmp_path: Path, step: int) -> None:
    """Its parts of earlier saves count."""
    groups, closed = ThreadGroup.make(3), threading.Event()

    def work(group: Group) -> Any:
        saver = ckpt.Checkpointer(tmp_path, every=None, group=group, timeout=600)
        saver.save(0, one_array(0)).result()
        last = saver.save(1, one_array(1))
        if group.rank == 1:
            saver.close()
            closed.set()
            return None
        assert closed.wait(600)
        last.result()
        if step == 2:
            with pytest.raises(ckpt.CkptError, match="rank 1 of 3 did not write its part of step 2 and has ended"):
                saver.save(2, one_array(2)).result()
        saver.close()
        return "raised"

    assert on_ranks(3, work, groups) == ["raised", None, "raised"]
    assert ckpt.open(tmp_path).steps() == [0, 1]
    all_well(on_ranks(3, lambda g: ckpt.save(one_array(3), tmp_path, 3, group=g, timeout=20), groups))
    assert list((tmp_path / "generations").rglob("*-*")) == [], "such markers are deleted with the generation"


FORKED = """
import os, sys, threading
import numpy as np
import ckpt
from ckpt.groups.threads import ThreadGroup

def rank(group):
    ck = ckpt.Checkpointer(sys.argv[1], every=None, group=group)
    ck.save(0, {"a": np.zeros(5000)}, blocking=True)
    if group.rank == 1:
        child = os.fork()
        if not child:
            ck.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        left.set()
    assert left.wait(60)
    ck.save(1, {"a": np.zeros(5000)}, blocking=True)
    said.append(sorted(name for name in os.listdir(sys.argv[1] + "/generations") if "left" in name))
    both.wait(60)
    ck.close()

left, both, said, groups = threading.Event(), threading.Barrier(2), [], ThreadGroup.make(2)
threads = [threading.Thread(target=rank, args=(group,)) for group in groups]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(said, ckpt.open(sys.argv[1]).steps())
"""


@pytest.mark.slow
def test_a_forked_child_does_not_end_the_saves_of_its_parent(tmp_path: Path) -> None:
    assert finish(python(FORKED, tmp_path)).strip() == "[[], []] [0, 1]"


def test_all_ranks_get_the_reason_why_rank_0_cannot_begin(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    found = on_ranks(3, lambda g: ckpt.save({"a": 1}, tmp_path, 0, group=g))
    assert all(isinstance(error, ckpt.FormatError) and "thesis.txt" in str(error) for error in found)


def test_a_loss_that_is_not_finite_on_one_rank_refuses_the_step(tmp_path: Path) -> None:
    def work(group: Group) -> Any:
        with ckpt.Checkpointer(tmp_path, every=1, group=group) as saver:
            saver.step(0, {"a": np.zeros(9)}, loss=1.0)
            saver.wait()
            saver.step(1, {"a": np.zeros(9)}, loss=float("nan") if group.rank == 2 else 1.0)
            saver.wait()

    all_well(on_ranks(3, work))  # a wait raises no error: nothing has failed
    assert ckpt.open(tmp_path).steps() == [0]


def test_failure_report_without_a_reason_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("steps/3/part/1-1-0-failed.json", json_records.encode("failure", {"rank": 1}))
    error = read_failure(store, "steps/3/part/1-1-0-failed.json")
    assert str(error) == f"{store.url}/steps/3/part/1-1-0-failed.json gives no reason; look at the log of that rank"


class Unreliable(LocalStore):
    """A store that writes a part and then raises, as if the answer were lost."""

    rank_1_fails = True

    def put(self, name: str, data: Any) -> None:
        super().put(name, data)
        if Unreliable.rank_1_fails and "/part/1-" in name and name.endswith(".arrow"):
            raise ckpt.StoreError("no answer came")


def test_a_rank_keeps_packs_that_rank_0_may_commit(tmp_path: Path) -> None:
    """The put of the part succeeded but its answer was lost: the packs must stay."""
    array = np.random.default_rng(0).standard_normal(40_000)
    found = on_ranks(2, lambda g: ckpt.save({"a": array}, Unreliable(tmp_path), 0, group=g))
    assert isinstance(found[1], ckpt.StoreError)
    for step in ckpt.open(tmp_path).steps():
        assert np.array_equal(ckpt.load(tmp_path, step=step)["a"], array)


def test_ranks_that_get_a_failure_at_different_calls_stay_in_step(tmp_path: Path) -> None:
    """Each committed step has one iteration of all ranks, though the library chooses the step numbers."""
    groups = ThreadGroup.make(2)
    met = threading.Barrier(2)

    def work(group: Group) -> list[Any]:
        errors: list[Any] = []
        for i in range(6):
            met.wait(600)
            state = {"a": ckpt.Shard(np.full(10, float(i)), (20,), (10 * group.rank,))}
            if i == 1 and group.rank == 1:
                state["bad"] = lambda: 0  # type: ignore[assignment]
            try:
                handle = ckpt.save(state, tmp_path, blocking=False, group=group, timeout=1)
                if i == 1 and group.rank == 0 and not handle.wait(600):
                    raise AssertionError("rank 0 did not get the failure")
                errors.append(None)
            except ckpt.CkptError as error:
                errors.append(type(error).__name__)
        ckpt.save({"a": ckpt.Shard(np.full(10, 9.0), (20,), (10 * group.rank,))}, tmp_path, 99, group=group)
        return errors

    errors = all_well(on_ranks(2, work, groups))
    assert errors[0] == [None, None, "SaveFailed", None, None, None]
    assert errors[1] == [None, "UnsupportedLeaf", None, None, None, None]
    assert ckpt.open(tmp_path).steps() == [0, 2, 3, 4, 5, 99]
    for step in ckpt.open(tmp_path).steps():
        assert len(set(ckpt.load(tmp_path, step=step, group=None)["a"].tolist())) == 1, step


def test_a_listing_that_fails_fails_on_all_ranks_and_the_next_load_works(tmp_path: Path) -> None:
    class Unlisted(LocalStore):
        """A store whose listings fail while `broken` is set."""

        broken = True

        def list_folders(self, prefix: str = "") -> Any:
            if Unlisted.broken:
                raise ckpt.StoreError("out of reach")
            return super().list_folders(prefix)

    groups = ThreadGroup.make(3)
    all_well(on_ranks(3, lambda g: ckpt.save({"a": np.ones(9)}, tmp_path, 0, group=g), groups))
    for error in on_ranks(3, lambda g: ckpt.load(Unlisted(tmp_path), group=g), groups):
        assert isinstance(error, ckpt.StoreError)
    Unlisted.broken = False
    for loaded in all_well(on_ranks(3, lambda g: ckpt.load(Unlisted(tmp_path), group=g), groups)):
        assert loaded["a"].tolist() == [1] * 9


def test_names_of_one_rank_differ_from_paths_with_an_at_sign(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"x": ckpt.PerRank(np.full(2, rank)), "x@0": np.full(2, 9), "x@1": np.full(2, 8)}

    all_well(on_ranks(2, lambda g: ckpt.save(state(g.rank), tmp_path, 0, group=g)))
    for rank, loaded in enumerate(all_well(on_ranks(2, lambda g: ckpt.load(tmp_path, group=g)))):
        assert [loaded[k].tolist() for k in ("x", "x@0", "x@1")] == [[rank] * 2, [9] * 2, [8] * 2]
