"""What a training loop publishes on its heartbeat page, and when it saves."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.tiers.memory_folder import MEMORY_VARIABLE
from ckpt.training import heartbeat_page
from ckpt.training.heartbeat_page import HeartbeatPage


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatPage]:
    """Yield the heartbeat page of this process."""
    page = HeartbeatPage(tmp_path / "page", new=True)
    monkeypatch.setenv(heartbeat_page.PAGE_VARIABLE, str(tmp_path / "page"))
    heartbeat_page.reset_after_fork()
    yield page
    monkeypatch.undo()
    heartbeat_page.reset_after_fork()


def test_damage_is_published_until_a_step_is_restored(tmp_path: Path, page: HeartbeatPage) -> None:
    """The page reports it while no step can be restored, and no longer once one is."""
    for step in (3, 4):
        ckpt.save({"x": np.arange(5000.0)}, tmp_path / "repo", step, group=None)
    good = {path: path.read_bytes() for path in (tmp_path / "repo/steps").rglob("commit.json")}
    for path in good:
        path.write_bytes(b"damaged")
    with ckpt.Checkpointer(tmp_path / "repo", every=7, group=None) as ck:
        with pytest.raises(ckpt.IntegrityError):
            ck.restore({"x": np.zeros(5000)})
        assert page.read().trouble == "damaged"
        path = tmp_path / "repo/steps/3/commit.json"
        path.write_bytes(good[path])
        assert ck.restore({"x": np.zeros(5000)}, step=3)[1] == 4
        assert page.read().trouble == ""


def test_a_missing_device_is_not_published_as_damage(
    tmp_path: Path, page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises EIO like a bad sector, but for all steps and for as long as it is missing."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ckpt.save({"x": np.arange(5000.0)}, tmp_path / "repo", 3, group=None)
    with ckpt.Checkpointer(tmp_path / "repo", every=7, group=None) as ck:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            with pytest.raises(ckpt.CkptError):
                ck.restore({"x": np.zeros(5000)})
        assert page.read().trouble == ""
        assert ck.restore({"x": np.zeros(5000)})[1] == 4


def test_a_second_checkpointer_does_not_hide_the_restored_step(tmp_path: Path, page: HeartbeatPage) -> None:
    """The page shows the restored step of the Checkpointer with the newest step."""
    ckpt.save({"x": np.zeros(3)}, tmp_path / "repo", 7, group=None)
    with ckpt.Checkpointer(tmp_path / "repo", group=None) as main, ckpt.Checkpointer(tmp_path / "ema", group=None) as other:
        assert main.restore({"x": np.ones(3)})[1] == 8
        assert other.restore({"x": np.ones(3)})[1] == 0
    assert (page.read().restored, page.read().committed) == (7, 7)


def test_abandoned_steps_do_not_count_as_durable(tmp_path: Path, page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a roll-back, the new steps are only in memory, and the repository of record has abandoned ones of their numbers."""
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path))
    state = {"x": np.zeros(3)}
    with ckpt.Checkpointer(tmp_path / "repo", every=None, tiers=[ckpt.Tier("memory", keep=None)], group=None) as ck:
        for step in range(6):
            ck.save(step, state)
            ck.wait()
        assert (page.read().durable, page.read().committed) == (5, 5)
        assert ck.restore(state, step=2)[1] == 3
        ck.step(3, state)
        ck.wait()
        assert (page.read().durable, page.read().committed) == (2, 3)


def test_steps_of_an_earlier_training_line_do_not_count_as_durable(tmp_path: Path, page: HeartbeatPage) -> None:
    """The loop went back without a restore, and its new steps have lower numbers."""
    page.publish_durable(19, 0)
    page.publish_committed(19, 0)
    page.publish_committed(10, 1)
    assert (page.read().durable, page.read().committed) == (9, 10)
    page.publish_durable(19, 0)  # a copy of an abandoned step has ended
    assert page.read().durable == 9
    page.publish_durable(10, 1)
    assert page.read().durable == 10


def test_each_step_publishes_a_heartbeat_whether_or_not_a_save_is_due(tmp_path: Path, page: HeartbeatPage) -> None:
    state, beats = {"x": np.zeros(3)}, 0
    with ckpt.Checkpointer(tmp_path / "repo", every=7, group=None) as ck:
        for step in range(60):
            assert (ck.step(step, state, loss=step / 2) is not None) == (step % 7 == 6)
            beat = page.read()
            assert (beat.step, beat.loss, beat.phase) == (step, step / 2, "step")
            assert beat.beats > beats
            beats = beat.beats
            if step % 7 == 6:
                ck.wait()
        assert ck._idle_window is not None, "most steps used the short path"
        page.request_stop(60)
        page.confirm_stop(60)
        with pytest.raises(SystemExit):
            ck.step(60, state, loss=0.0)
    assert ckpt.open(tmp_path / "repo").steps() == [*range(6, 60, 7), 60]


def test_events_between_two_saves_are_published(tmp_path: Path, page: HeartbeatPage) -> None:
    state = {"x": np.zeros(3)}
    with ckpt.Checkpointer(tmp_path / "repo", every=100, group=None) as ck:
        for step in (0, 1, 2):
            ck.step(step, state, loss=1.0)
        assert ck._idle_window is not None
        ck.step(1, state, loss=2.0)  # a lower number: the loop went back
        assert page.read().step == 1
        for step in (2, 3):
            ck.step(step, state)
        assert ck._idle_window is not None
        ck.save(3, state)  # in the background
        assert ck._idle_window is None
        ck.wait()
        for step in (4, 5, 6):
            ck.step(step, state, loss=1.0)
        assert ck._idle_window is not None
        ck.step(7, state, loss=math.inf)
        bad = page.read().bad
        assert bad is not None
        assert (bad.step, bad.loss) == (7, math.inf)
        assert ck.step(99, state, loss=1.0) is None
    assert ckpt.open(tmp_path / "repo").steps() == [3]
    with pytest.raises(ckpt.CkptError, match="closed"):
        ck.step(8, state)


def test_a_save_is_due_after_its_interval(tmp_path: Path, page: HeartbeatPage) -> None:
    step, began = 0, time.monotonic()
    with ckpt.Checkpointer(tmp_path / "repo", every=timedelta(seconds=0.2), group=None) as ck:
        while ck.step(step, {"x": np.zeros(3)}) is None:
            step += 1
            assert time.monotonic() - began < 60
    assert time.monotonic() - began >= 0.2
    assert ckpt.open(tmp_path / "repo").steps() == [step]
