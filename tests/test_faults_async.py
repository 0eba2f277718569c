"""Saving in the background: nothing that changes after `save` has returned gets into a checkpoint, and errors are told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import assert_clean, assert_same, failing, finish, one_line, python, state_of, write_into

import ckpt
from ckpt.saving.change_detection import first_changed_leaf, sample_block
from ckpt.saving.write_plan import LeafSpec, plan_blocks, stage_block
from ckpt.state.leaves.numpy import NumpyLeaf

torch = pytest.importorskip("torch")

SLOW = "save.stage=sleep:0.3@*"
"""Every block takes long to stage, so that a change in the meantime surely meets it."""


def model_and_optimizer() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 64)).square().mean().backward()
    optimizer.step()


def copied(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(got: Any, want: Any) -> None:
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


# --- without attach: impossible --------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [None, 64 << 10])
def test_changes_after_save_returned_are_not_saved(tmp_path: Path, memory: int | None) -> None:
    """numpy and torch, with room for all of the state and with room for a part."""
    state = {"numpy": state_of(0), "torch": torch.arange(50_000, dtype=torch.float64)}
    with failing("local.append=sleep:0.1@*,save.stage=sleep:0.05@*"):
        for step in range(3):
            write_into(state["numpy"], state_of(step))
            state["torch"].copy_(torch.arange(50_000) + step)
            handle = ckpt.save(state, tmp_path, step, blocking=False, memory=memory)
            write_into(state["numpy"], state_of(99))
            state["torch"].fill_(-1)
            handle.result()
    for step in range(3):
        got = ckpt.load(tmp_path, step=step)
        assert_same(got["numpy"], state_of(step))
        assert torch.equal(got["torch"], torch.arange(50_000, dtype=torch.float64) + step)


def test_an_optimizer_that_is_not_attached_need_not_wait(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with failing("local.append=sleep:0.3@*"), ckpt.Checkpointer(tmp_path) as saver:
        want = copied(model)
        handle = saver.save(0, {"model": model, "optimizer": optimizer})
        assert handle.staged.is_set()
        train(model, optimizer)
        handle.result()
    assert_equal(ckpt.load(tmp_path)["model"], want)


# --- with attach: the optimizer waits, other changes are detected -----------------------------------------------


def test_an_attached_optimizer_waits(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with ckpt.Checkpointer(tmp_path, in_flight=2) as saver:
        saver.attach(optimizer)
        for step in range(3):
            want = copied(model)
            with failing(SLOW):
                handle = saver.save(step, {"model": model, "optimizer": optimizer})
                assert not handle.staged.is_set()
                train(model, optimizer)
                assert handle.staged.is_set()
            handle.result()
            assert_equal(ckpt.load(tmp_path, step=step)["model"], want)


def test_two_saves_in_flight_both_hold_the_optimizer(tmp_path: Path) -> None:
    """The step waits for the staging of every save under way, not only of the last."""
    model, optimizer = model_and_optimizer()
    with ckpt.Checkpointer(tmp_path, in_flight=2) as saver:
        saver.attach(optimizer)
        want = copied(model)
        with failing("save.stage=sleep:1@1"):  # only the first save is slow
            first = saver.save(0, model)
            second = saver.save(1, model)
            train(model, optimizer)
            assert first.staged.is_set()
            first.result()
            second.result()
    assert_equal(ckpt.load(tmp_path, step=0), want)
    assert_equal(ckpt.load(tmp_path, step=1), want)


CHANGES: dict[str, Callable[[Any], object]] = {
    "add_": lambda w: w.add_(1),
    "copy_": lambda w: w.copy_(w * 2),
    "zero_": lambda w: w.zero_(),
    # torch does not count these
    "data": lambda w: w.data.add_(1),
    "average": lambda w: w.data.mul_(0.999),
    "numpy": lambda w: w.detach().numpy().fill(7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_of_attached_memory_are_detected(tmp_path: Path, change: str) -> None:
    model, optimizer = model_and_optimizer()
    saver = ckpt.Checkpointer(tmp_path)
    saver.attach(optimizer)
    saver.save(0, {"model": model}).result()
    with failing(SLOW):
        handle = saver.save(1, {"model": model})
        with torch.no_grad():
            CHANGES[change](model[1].weight)
        with pytest.raises(ckpt.StateChanged) as told:
            handle.result()
    one_line(told, "model.1.weight", "step 1", "step()")
    assert ckpt.open(tmp_path).steps() == [0]
    saver.save(2, {"model": model})
    saver.close()
    assert_equal(ckpt.load(tmp_path)["model"], copied(model))
    assert ckpt.open(tmp_path).steps() == [0, 2]
    assert_clean(tmp_path, folders=False)


def test_attached_memory_that_is_not_contiguous_is_copied_at_once(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8).t()[:, ::2])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with failing(SLOW), ckpt.Checkpointer(tmp_path) as saver:
        saver.attach(optimizer)
        handle = saver.save(0, {"w": weight})
        weight.data.zero_()
        handle.result()
    assert torch.equal(ckpt.load(tmp_path)["w"], torch.ones(8, 4))


@given(st.integers(1, 2000), st.integers(1, 5), st.data())
def test_what_a_sample_sees(size: int, leaves: int, data: st.DataObject) -> None:
    """A changed leaf, whichever it is and however its bytes lie in the block; nothing where nothing changed."""
    held = [NumpyLeaf(np.arange(size * (i + 1), dtype=np.int32)) for i in range(leaves)]
    (block,) = plan_blocks([LeafSpec(str(i), x.dtype, x.shape, x.itemsize, x.nbytes, None) for i, x in enumerate(held)]).blocks
    before = sample_block(block, held)
    staged = np.empty(block.nbytes, np.uint8)
    stage_block(block, held, staged)
    assert first_changed_leaf(block, before, staged) is None
    changed = data.draw(st.integers(0, leaves - 1))
    held[changed].array += 1
    stage_block(block, held, staged)
    assert first_changed_leaf(block, before, staged) == changed


def test_what_is_not_attached_is_copied_before_save_returns(tmp_path: Path) -> None:
    """Also in a state where other leaves are staged late."""
    model, optimizer = model_and_optimizer()
    extra = {"ema": torch.ones(1000), "numpy": np.ones(1000)}
    with ckpt.Checkpointer(tmp_path) as saver:
        saver.attach(optimizer)
        with failing(SLOW):
            handle = saver.save(0, {"model": model, "extra": extra})
            extra["ema"].zero_()
            extra["numpy"][:] = 0
            handle.result()
    got = ckpt.load(tmp_path)["extra"]
    assert torch.equal(got["ema"], torch.ones(1000))
    assert_same(got["numpy"], np.ones(1000))


def test_jax_arrays_never_change(tmp_path: Path) -> None:
    """They are referenced, not copied: a donated buffer must not be reused under the save."""
    jax = pytest.importorskip("jax")
    state = jax.numpy.arange(100_000, dtype="float32")
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    with failing(SLOW):
        handle = ckpt.save({"w": state}, tmp_path, 0, blocking=False)
        for _ in range(5):
            state = bump(state)
        jax.block_until_ready(state)
        handle.result()
    assert_same(np.asarray(ckpt.load(tmp_path)["w"]), np.arange(100_000, dtype="float32"))


def test_attach_refuses_what_it_cannot_hook(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as saver, pytest.raises(ckpt.CkptError) as told:
        saver.attach(object())
    one_line(told, "object", "torch optimizer")


# --- how many at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_at_most_so_many_in_flight(tmp_path: Path, limit: int) -> None:
    with failing("local.append=sleep:0.05@*"), ckpt.Checkpointer(tmp_path, in_flight=limit, keep=2) as saver:
        handles = []
        most = 0
        for step in range(8):
            handles.append(saver.save(step, state_of(step)))
            most = max(most, sum(not h.done() for h in handles))
            assert most <= limit
    assert most == limit
    assert ckpt.open(tmp_path).steps()[-1] == 7


# --- errors of the background ----------------------------------------------------------------------------------


def broken_save(root: Path, saver: ckpt.Checkpointer) -> None:
    """Let step 7 fail in the background, and wait for that, unseen."""
    with failing("save.commit=error"):
        saver.save(7, state_of(7)).wait()


@pytest.mark.parametrize("call", ["step", "save", "wait", "close", "exit"])
def test_an_error_is_raised_by_the_next_call(tmp_path: Path, call: str) -> None:
    saver = ckpt.Checkpointer(tmp_path, every=1)
    saver.save(1, state_of(1)).result()
    broken_save(tmp_path, saver)
    with pytest.raises(ckpt.SaveFailed) as told:
        if call == "exit":
            with saver:
                pass
        elif call in ("step", "save"):
            getattr(saver, call)(8, state_of(8))
        else:
            getattr(saver, call)()
    one_line(told, "step 7", "failed", str(tmp_path))
    if call not in ("close", "exit"):
        saver.save(8, state_of(8))
        saver.close()
        assert ckpt.open(tmp_path).steps() == [1, 8]
        assert_clean(tmp_path, folders=False)


def test_every_error_is_told_once(tmp_path: Path) -> None:
    saver = ckpt.Checkpointer(tmp_path, in_flight=2)
    with failing("save.commit=error@*"):
        for step in (7, 8):
            saver.save(step, state_of(step))
        saver._require_open().wait()
    told = []
    for _ in range(2):
        with pytest.raises(ckpt.SaveFailed) as error:
            saver.wait()
        told.append(str(error.value))
    assert "step 7" in told[0]
    assert "step 8" in told[1]
    saver.close()


def test_an_error_that_result_raised_is_not_raised_again(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as saver, failing("save.commit=error"):
        with pytest.raises(ckpt.StoreError):
            saver.save(0, state_of(0)).result()
        saver.save(1, state_of(1))
    assert ckpt.open(tmp_path).steps() == [1]


def test_the_error_of_a_handle_that_nobody_keeps(tmp_path: Path) -> None:
    """ckpt.save without Checkpointer: the next save to that URL raises it."""
    ckpt.save(state_of(0), tmp_path, 0)
    with failing("save.commit=error"):
        ckpt.save(state_of(1), tmp_path, 1, blocking=False).wait()
    with pytest.raises(ckpt.SaveFailed) as told:
        ckpt.save(state_of(2), tmp_path, 2)
    one_line(told, "step 1")
    ckpt.save(state_of(2), tmp_path, 2)
    assert ckpt.open(tmp_path).steps() == [0, 2]
    assert_clean(tmp_path, folders=False)


def test_an_error_inside_with_is_not_hidden_by_one_of_the_background(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="mine"), caplog.at_level(logging.ERROR), ckpt.Checkpointer(tmp_path) as saver:
        broken_save(tmp_path, saver)
        raise KeyError("mine")
    assert "step 7" in caplog.text


def test_an_error_is_logged_at_exit(tmp_path: Path) -> None:
    code = """
import logging, sys, ckpt
from support import state_of
from ckpt.storage.base.failpoints import set_failpoints
logging.basicConfig(stream=sys.stdout)
ckpt.save(state_of(0), sys.argv[1], 0)
set_failpoints("save.commit=error")
ckpt.save(state_of(1), sys.argv[1], 1, blocking=False)
"""
    process = python(code, tmp_path)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 120
    assert "ERROR:ckpt:saving step 1" in out
    assert ckpt.open(tmp_path).steps() == [0]


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    """Also one that forgot to wait."""
    code = """
import sys, ckpt
from support import state_of
from ckpt.storage.base.failpoints import set_failpoints
set_failpoints("local.append=sleep:0.3@*")
ckpt.save(state_of(3), sys.argv[1], 3, blocking=False)
"""
    finish(python(code, tmp_path))
    assert_same(ckpt.load(tmp_path, step=3), state_of(3))


@pytest.mark.parametrize("blocking", [True, False])
def test_an_interrupt_while_saving(tmp_path: Path, blocking: bool) -> None:
    """Ctrl-C: the step is whole or not there, the process ends, and the next save works."""
    code = """
import os, signal, sys, threading, time, ckpt
from support import state_of
from ckpt.storage.base.failpoints import set_failpoints
url, blocking = sys.argv[1], sys.argv[2] == "True"
ckpt.save(state_of(0), url, 0)
set_failpoints("save.stage=sleep:0.3@*,local.append=sleep:0.3@*")
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    ckpt.save(state_of(1), url, 1, blocking=blocking)
    time.sleep(5)
    print("went through")
except KeyboardInterrupt:
    print("interrupted", flush=True)
set_failpoints("")
try:
    ckpt.save(state_of(2), url, 2)
except ckpt.SaveFailed:
    ckpt.save(state_of(2), url, 2)
"""
    out = finish(python(code, tmp_path, blocking))
    assert "interrupted" in out
    steps = ckpt.open(tmp_path).steps()
    assert steps in ([0, 2], [0, 1, 2])
    for step in steps:
        assert_same(ckpt.load(tmp_path, step=step), state_of(step))
    assert_clean(tmp_path, folders=False)


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # of namespaces that other tests have opened
    with ckpt.Checkpointer(tmp_path) as saver:
        for step in range(3):
            saver.save(step, state_of(step))
        broken_save(tmp_path, saver)
        with pytest.raises(ckpt.SaveFailed):
            saver.wait()
    assert not [t for t in threading.enumerate() if t.name.startswith("ckpt") and t not in before]
