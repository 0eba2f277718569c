"""Retention: which steps are deleted, and that no block is deleted which another step needs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.failing_store import failing
from helpers.folders import fast_folder
from helpers.processes import SOAK
from helpers.repositories import assert_clean
from helpers.states import assert_same, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import Keep

KEEPS = st.builds(Keep, st.integers(1, 5), st.none() | st.integers(1, 12))


@contextmanager
def fast_repository(tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a new repository in a fast folder."""
    with fast_folder(tmp_path) as folder:
        yield folder / "run"


STATES = st.integers(0, 12)
ACTIONS = st.one_of(
    st.tuples(st.just("save"), STATES, st.none() | KEEPS),
    st.tuples(st.just("overwrite"), STATES, st.none() | KEEPS),
    st.tuples(st.just("fail"), STATES, st.sampled_from(["save.manifest", "save.commit"])),
    st.tuples(st.just("stop"), STATES, st.sampled_from(["delete.commit", "delete.files", "delete.packs", "local.delete"])),
    st.tuples(st.just("two"), STATES, KEEPS),
)


@pytest.mark.soak
@settings(max_examples=300 if SOAK else 25, deadline=None, print_blob=True)
@given(actions=st.lists(ACTIONS, max_size=10))
def test_every_listed_step_stays_whole(tmp_path_factory: pytest.TempPathFactory, actions: list[Any]) -> None:
    """Whatever is saved, replaced, given up and deleted: every listed step loads, and no other file exists.

    There are few states, so that many steps share blocks; the state of a step is that of its last save.
    """
    with fast_repository(tmp_path_factory.mktemp("model")) as root:
        ckpt.save(state_of(0), root, 0)
        states = {0: 0}
        for i, (action, state, option) in enumerate(actions, 1):
            step = i
            if action == "overwrite":
                step = state % i
                ckpt.save(state_of(state), root, step, keep=option, overwrite=True)
            elif action == "fail":
                with failing(f"{option}=error"), pytest.raises(ckpt.StoreError):
                    ckpt.save(state_of(state), root, step)
            elif action == "stop":  # the deletion is interrupted after the commit of the save
                with failing(f"{option}=error"):
                    ckpt.save(state_of(state), root, step, keep=1)
            elif action == "two":  # two saves in flight; the later one may commit and delete first
                with failing("save.stage=sleep:0.02@1"):
                    first = ckpt.save(state_of(state + 1), root, i + 100, keep=option, blocking=False)
                    ckpt.save(state_of(state), root, step, keep=option)
                    first.result()
                states[i + 100] = state + 1
            else:
                ckpt.save(state_of(state), root, step, keep=option)
            if action != "fail":
                states[step] = state
                if action != "two":
                    assert step in ckpt.open(root).steps(), "the step just saved was deleted"
            for listed in ckpt.open(root).steps():
                assert_same(ckpt.load(root, step=listed), state_of(states[listed]))
        ckpt.save(state_of(5), root, 500, keep=2)
        assert ckpt.open(root).steps()[-1] == 500
        assert_clean(root)


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "fast"), [(1, 2), (2, 1)])
def test_a_save_in_flight_keeps_the_packs_that_it_references(tmp_path: Path, slow: int, fast: int) -> None:
    """One save references the blocks of step 0; the other commits first and deletes step 0."""
    ckpt.save(state_of(0), tmp_path, 0)
    other = state_of(50)
    other["embed"] ^= 1  # otherwise it would reference the pack of step 0, too
    states = {slow: state_of(0) | {"n": slow}, fast: other}
    with ckpt.Checkpointer(tmp_path, in_flight=2, keep=1) as saver:
        with failing("save.manifest=sleep:1@1"):
            handle = saver.save(slow, states[slow])
            time.sleep(0.3)  # by now it has chosen the blocks to reference
            saver.save(fast, states[fast]).result()
            handle.result()
        steps = saver.repository.steps()
        assert sorted(steps) in ([2], [1, 2])
        for step in steps:
            assert_same(ckpt.load(tmp_path, step=step), states[step])
        saver.save(3, state_of(3))
    assert ckpt.open(tmp_path).steps() == [3]
    assert_clean(tmp_path, folders=False)


@pytest.mark.slow
def test_concurrent_saves_and_deletions_keep_committed_steps(tmp_path: Path) -> None:
    """Commits and deletions at the same time never delete a file of a step that was just committed."""
    with ckpt.Checkpointer(tmp_path, in_flight=4, keep=3) as saver:
        for step in range(40):
            saver.save(step, state_of(step))
            for listed in saver.repository.steps()[-2:]:
                try:
                    assert_same(ckpt.load(tmp_path, step=listed), state_of(listed))
                except ckpt.CkptError:
                    assert listed not in saver.repository.steps()
        saver.wait()
        assert len(saver.repository.steps()) >= 3
        for listed in saver.repository.steps():
            assert_same(ckpt.load(tmp_path, step=listed), state_of(listed))
        saver.save(40, state_of(40), blocking=True)
        assert saver.repository.steps() == [38, 39, 40]
    assert_clean(tmp_path, folders=False)


def test_every_kth_step_is_kept_for_ever(tmp_path: Path) -> None:
    for step in range(13):
        ckpt.save(state_of(step), tmp_path, step, keep=Keep(2, every=5))
    assert ckpt.open(tmp_path).steps() == [0, 5, 10, 11, 12]
    for step in (0, 5, 10, 11, 12):
        assert_same(ckpt.load(tmp_path, step=step), state_of(step))
    assert_clean(tmp_path)


def test_a_step_without_its_manifest_does_not_count(tmp_path: Path) -> None:
    """keep=2 with a damaged step: the step before it stays until two newer good ones exist."""
    for step in range(3):
        ckpt.save(state_of(step), tmp_path, step)
    shutil.rmtree(tmp_path / "steps/2/manifest")
    repo = ckpt.open(tmp_path)
    ckpt.save(state_of(3), tmp_path, 3, keep=2)
    assert repo.steps() == [1, 2, 3]
    assert_same(ckpt.load(tmp_path, step=1), state_of(1))
    ckpt.save(state_of(4), tmp_path, 4, keep=2)
    assert repo.steps() == [3, 4]
    assert_clean(tmp_path)


def test_steps_saved_after_a_roll_back_are_kept(tmp_path: Path) -> None:
    """Older steps have higher numbers; the new steps must not be deleted as the oldest."""
    for step in (10, 20, 30):
        ckpt.save(state_of(step), tmp_path, step)
    with ckpt.Checkpointer(tmp_path, keep=2) as saver:
        state, start = saver.restore(state_of(0), step=10)
        assert_same(state, state_of(10))
        assert start == 11
        for step in (12, 14):
            saver.save(step, state_of(step), blocking=True)
            assert step in saver.repository.steps()
            assert_same(ckpt.load(tmp_path, step=step), state_of(step))
