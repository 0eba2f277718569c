"""Losses that are not finite, and spikes of a loss: which steps are saved, and to which step a run goes back."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.loop_runs import PROGRAM, Job, page_of, rollback_variables
from helpers.loop_runs import job as job
from helpers.page_cache import bypasses_cache, drop_cache, is_cached

import ckpt
from ckpt.recovery.policy.loss_rollback import roll_back
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.local.durable_writer import O_DIRECT
from ckpt.training import heartbeat_page
from ckpt.training.batch_order import SKIP_VARIABLE, parse_ranges
from ckpt.training.heartbeat_page import HeartbeatPage
from ckpt.training.heartbeat_records import BadLoss
from ckpt.training.loss_monitor import LossMonitor
from ckpt.training.restore_step_limit import RESTORE_STEP_LIMIT_VARIABLE


def test_no_rank_saves_after_a_bad_loss(job: Callable[..., Job], tmp_path: Path) -> None:
    """No rank saves, so the step does not exist; each heartbeat page has the step at which the bad loss began."""
    losses = tmp_path / "losses"
    losses.write_text(json.dumps({"7": math.nan, "9": math.inf}))
    ranks = job(16, 0.0, 3, losses, size=2)
    outputs = ranks.end()
    assert ckpt.open(tmp_path / "repo").steps() == [2, 5]
    assert all("step 8 is not saved: the loss of step 7 is nan" in text for text in outputs)
    for bad in page_of(ranks.beats()):
        assert bad is not None
        assert (bad.step, bad.kind, bad.limit, bad.batch) == (7, "not finite", math.inf, -1)
        assert math.isnan(bad.loss)


def test_no_step_is_saved_after_a_spike_of_the_loss(job: Callable[..., Job], tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    losses.write_text(json.dumps({"30": 4.0, "10": 0.2}))
    ranks = job(40, 0.0, 10, losses, size=1, CKPT_SPIKE="10")
    (output,) = ranks.end()
    assert ckpt.open(tmp_path / "repo").steps() == [9, 19, 29]
    assert "step 39 is not saved: the loss of step 30 jumped to 4.0" in output
    (bad,) = page_of(ranks.beats())
    assert bad is not None
    assert (bad.step, bad.kind, bad.loss) == (30, "spike", 4.0)
    assert 1.0 < bad.limit < 1.5


def test_steps_after_a_spike_right_after_a_restart_are_not_saved(job: Callable[..., Job], tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    losses.write_text(json.dumps({"3": 4.0}))
    ranks = job(5, 0.0, 1, losses, size=1, CKPT_SPIKE="10", CKPT_SPIKE_LIMIT="1.2")
    ranks.end()
    assert ckpt.open(tmp_path / "repo").steps() == [0, 1, 2]


def test_without_ckpt_run_only_a_step_with_a_loss_not_finite_is_skipped(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "repo", every=1, group=None) as ck:
        for step, loss in enumerate([1.0, math.nan, 1.0, 100.0]):
            ck.step(step, {"x": np.zeros(3)}, loss=loss)
    assert ckpt.open(tmp_path / "repo").steps() == [0, 2, 3]


def test_a_loss_on_a_device_is_read_when_it_is_ready(tmp_path: Path) -> None:
    """jax returns an array before it is computed. The heartbeat page gets the loss when it is ready."""

    class Later:
        def __init__(self, value: float) -> None:
            self.value, self.there, self.asked = value, False, 0

        def copy_to_host_async(self) -> None:
            self.asked += 1

        def is_ready(self) -> bool:
            return self.there

        def item(self) -> float:
            assert self.there, "the training waited for the loss"
            return self.value

    page = HeartbeatPage(tmp_path / "p", new=True)
    losses = LossMonitor(page, None)
    given = [Later(1.0), Later(math.nan), Later(2.0)]
    for step, loss in enumerate(given):
        page.publish_batch(10 + step)
        losses.add(step, loss)
    assert [loss.asked for loss in given] == [1, 1, 1]
    assert page.read().bad is None
    given[0].there = given[1].there = True
    late = Later(3.0)
    losses.add(3, late)
    bad = page.read().bad
    assert bad is not None
    assert losses.bad_loss is not None
    assert (bad.step, bad.batch) == (1, 11), "the batch of another step is reported"
    given[2].there = late.there = True
    losses.wait()
    assert page.read().loss == 3.0
    page.close()


@pytest.mark.parametrize("library", ["torch", "jax", "numpy"])
def test_losses_of_each_library_are_read(tmp_path: Path, library: str) -> None:
    module = pytest.importorskip({"jax": "jax.numpy"}.get(library, library))
    page = HeartbeatPage(tmp_path / "p", new=True)
    losses = LossMonitor(page, None)
    make = functools.partial(module.tensor, requires_grad=True) if library == "torch" else module.asarray
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.add(0, make(1.5))
        losses.add(1, make(math.inf))
        losses.wait()
    assert page.read().loss == math.inf
    assert losses.bad_loss == BadLoss(1, "not finite", math.inf, math.inf, -1)
    page.close()


def test_a_step_after_a_suspect_loss_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of `keep` do not count it, either."""
    url = tmp_path / "repo"
    for step in range(6):
        ckpt.save({"x": np.full(3, float(step))}, url, step=step, group=None)
    monkeypatch.setenv(RESTORE_STEP_LIMIT_VARIABLE, "4")
    with ckpt.Checkpointer(url, every=1, keep=2, group=None) as ck:
        state, start = ck.restore({"x": np.zeros(3)})
        assert (state["x"][0], start) == (3.0, 4)
        ck.save(4, {"x": np.full(3, 44.0)}, blocking=True).result()
        assert ckpt.open(url).steps() == [3, 4], "step 5, which may be spoiled, is abandoned and deleted first"
    monkeypatch.setenv(RESTORE_STEP_LIMIT_VARIABLE, "1")
    with ckpt.Checkpointer(url, group=None) as ck:
        assert ck.restore({"x": np.zeros(3)})[1] == 5, "without an older step the newest one is restored"
    monkeypatch.setenv(RESTORE_STEP_LIMIT_VARIABLE, "x")
    with pytest.raises(InvalidArgument, match="is not a step"), ckpt.Checkpointer(url, group=None) as ck:
        ck.restore({"x": np.zeros(3)})
    monkeypatch.delenv(RESTORE_STEP_LIMIT_VARIABLE)
    assert ckpt.load(url, group=None)["x"][0] == 44.0


def test_a_batch_that_spoils_the_weights_is_skipped(tmp_path: Path) -> None:
    """The spoiled weights are saved before a loss shows it. The final weights equal those of a run without that batch."""
    history: list[BadLoss] = []
    actions: list[str] = []
    environ: dict[str, str] = {}
    for attempt in range(6):
        page = HeartbeatPage(tmp_path / f"page-{attempt}", new=True)
        command = [sys.executable, str(Path(PROGRAM).with_name("spoiled_training.py")), str(tmp_path / "repo"), "20", "13"]
        environ[heartbeat_page.PAGE_VARIABLE] = str(tmp_path / f"page-{attempt}")
        subprocess.run(command, env=os.environ | environ, check=True, timeout=600, stderr=subprocess.DEVNULL)
        beat = page.read()
        page.close()
        if beat.bad is None:
            break
        history.append(beat.bad)
        decision = roll_back(history, parse_ranges(environ.get(SKIP_VARIABLE, "")))
        actions.append(decision.action)
        environ |= rollback_variables(decision)
    assert actions == ["retry", "skip"]
    assert environ[SKIP_VARIABLE] == "13-14"
    assert [(bad.step, bad.batch) for bad in history] == [(14, 14)] * 2
    batches = [n for n in range(22) if n not in (13, 14)]
    want = np.zeros(3)
    for n in batches:
        want += np.sin([2 * n, 2 * n + 1]).sum()
    found = ckpt.load(tmp_path / "repo", group=None)
    assert np.array_equal(found["w"], want)
    assert ckpt.open(tmp_path / "repo").steps()[-1] == 19


def test_older_steps_are_tried_newest_first_up_to_the_limit() -> None:
    from ckpt.format.training_lines import order_by_number

    for numbers in itertools.permutations([1, 4, 7, 9]):
        assert order_by_number(numbers).newest_first(None) == [9, 7, 4, 1]
        assert order_by_number(numbers).newest_first(7) == [4, 1, 9, 7]
        assert order_by_number(numbers).newest_first(0) == [9, 7, 4, 1]


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
def test_a_restore_bypasses_the_page_cache(tmp_path: Path) -> None:
    """A restore happens once; a step that is loaded by ckpt.load may be loaded again."""
    values = np.random.default_rng(3).standard_normal(1 << 20)
    with ckpt.Checkpointer(tmp_path, codec="none") as saver:
        saver.save(0, {"w": values}).result()
    (pack,) = tmp_path.rglob("*.pack")
    drop_cache(pack)
    if is_cached(pack, 1 << 20):
        pytest.skip("a file system that is all in memory")

    def restore() -> None:
        with ckpt.Checkpointer(tmp_path) as saver:
            restored, start = saver.restore({"w": np.zeros(1 << 20)})
        assert start == 1
        assert np.array_equal(restored["w"], values)

    assert bypasses_cache([pack], restore, lambda: is_cached(pack, 5 << 20))
    assert np.array_equal(ckpt.load(tmp_path)["w"], values)
    assert is_cached(pack, 6 << 20)
