"""Nothing that changes after `save` has returned gets into a checkpoint."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.failing_store import failing
from helpers.messages import one_line
from helpers.processes import until
from helpers.repositories import assert_clean
from helpers.states import assert_same, state_of, write_into
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt import checkpointer
from ckpt.saving.block_plan import LeafSpec, plan_blocks, stage_block
from ckpt.saving.change_detection import first_changed_leaf, sample_block
from ckpt.saving.deferred_blocks import DeferredBlocks
from ckpt.state.leaves.numpy import NumpyLeaf

torch = pytest.importorskip("torch")
SLOW = "save.stage=sleep:0.3@*"
"""Staging of every block takes long, so that a change is made meanwhile."""


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


def copy_of(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def copy_of_tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in state.items()}


def assert_equal(got: Any, want: Any) -> None:
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("memory", [None, 64 << 10])
def test_changes_after_save_has_returned_are_not_saved(tmp_path: Path, memory: int | None) -> None:
    """The state has numpy and torch arrays; the memory for staging has room for all of it or for a part."""
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


def test_the_step_of_an_unattached_optimizer_does_not_wait(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with failing("local.append=sleep:0.3@*"), ckpt.Checkpointer(tmp_path) as saver:
        want = copy_of(model)
        handle = saver.save(0, {"model": model, "optimizer": optimizer})
        assert handle.staged.is_set()
        train(model, optimizer)
        handle.result()
    assert_equal(ckpt.load(tmp_path)["model"], want)


def test_the_step_of_an_attached_optimizer_waits_for_staging(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with ckpt.Checkpointer(tmp_path, in_flight=2) as saver:
        saver.attach(optimizer)
        for step in range(3):
            want = copy_of(model)
            with failing(SLOW):
                handle = saver.save(step, {"model": model, "optimizer": optimizer})
                assert not handle.staged.is_set()
                train(model, optimizer)
                assert handle.staged.is_set()
            handle.result()
            assert_equal(ckpt.load(tmp_path, step=step)["model"], want)


def test_a_step_that_a_graph_records_waits_for_staging_and_later_saves_defer_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay of the graph calls no hook, so it may change the memory of a save that was begun before the recording."""
    model, optimizer = model_and_optimizer()
    monkeypatch.setattr(checkpointer, "is_recording_graph", lambda: True)  # as torch answers on a CUDA device
    with ckpt.Checkpointer(tmp_path) as saver:
        saver.attach(optimizer)
        with failing(SLOW):
            before = saver.save(0, {"model": model, "optimizer": optimizer})
            assert not before.staged.is_set()
            optimizer.step()
            assert before.staged.is_set()
            assert "is recorded in a CUDA graph" in caplog.text
            assert saver.save(1, {"model": model, "optimizer": optimizer}).staged.is_set()


def test_an_optimizer_step_waits_for_the_staging_of_every_save(tmp_path: Path) -> None:
    """It waits for each save in flight, not only for the last one."""
    model, optimizer = model_and_optimizer()
    with ckpt.Checkpointer(tmp_path, in_flight=2) as saver:
        saver.attach(optimizer)
        want = copy_of(model)
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
    # torch does not count these changes
    "data": lambda w: w.data.add_(1),
    "average": lambda w: w.data.mul_(0.999),
    "numpy": lambda w: w.detach().numpy().fill(7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_of_attached_memory_fail_the_save(tmp_path: Path, change: str) -> None:
    model, optimizer = model_and_optimizer()
    saver = ckpt.Checkpointer(tmp_path)
    saver.attach(optimizer)
    saver.save(0, {"model": model}).result()
    with failing(SLOW):
        handle = saver.save(1, {"model": model})
        with torch.no_grad():
            CHANGES[change](model[1].weight)
        with pytest.raises(ckpt.StateChanged) as error:
            handle.result()
    one_line(error, "model.1.weight", "step 1", "step()")
    assert ckpt.open(tmp_path).steps() == [0]
    saver.save(2, {"model": model})
    saver.close()
    assert_equal(ckpt.load(tmp_path)["model"], copy_of(model))
    assert ckpt.open(tmp_path).steps() == [0, 2]
    assert_clean(tmp_path, folders=False)


def test_a_save_whose_comparison_of_attached_memory_fails_ends_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writers would wait without end for further blocks."""
    model, optimizer = model_and_optimizer()
    saver = ckpt.Checkpointer(tmp_path)
    saver.attach(optimizer)

    def fail(deferred: DeferredBlocks) -> None:
        raise MemoryError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(DeferredBlocks, "first_changed_name", fail)
        with pytest.raises(MemoryError, match="no memory is left"):
            saver.save(0, {"model": model}).result(timeout=300)
    saver.save(1, {"model": model})
    saver.close()
    assert ckpt.open(tmp_path).steps() == [1]


def test_attached_memory_that_is_not_contiguous_is_copied_before_save_returns(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8).t()[:, ::2])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with failing(SLOW), ckpt.Checkpointer(tmp_path) as saver:
        saver.attach(optimizer)
        handle = saver.save(0, {"w": weight})
        weight.data.zero_()
        handle.result()
    assert torch.equal(ckpt.load(tmp_path)["w"], torch.ones(8, 4))


def test_views_of_attached_memory_are_copied_later_and_the_next_step_waits(tmp_path: Path) -> None:
    """As with the flat partitions of an optimizer that updates all parameters as one tensor."""
    flat = torch.nn.Parameter(torch.arange(40_000, dtype=torch.float32))
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    saved = {"second": flat.detach()[10_000:20_000].view(100, 100), "last": flat.detach()[30_000:]}
    want = copy_of_tensors(saved)
    with ckpt.Checkpointer(tmp_path, in_flight=2) as saver:
        saver.attach(optimizer)
        for step in range(3):
            want = copy_of_tensors(saved)
            with failing(SLOW):
                handle = saver.save(step, saved)
                assert not handle.staged.is_set()
                flat.grad = torch.ones_like(flat)
                optimizer.step()
                assert handle.staged.is_set()
            handle.result()
            assert_equal(ckpt.load(tmp_path, step=step), want)
            assert not torch.equal(saved["last"], want["last"])


def test_a_save_keeps_no_memory_of_an_optimizer_alive(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with ckpt.Checkpointer(tmp_path) as saver:
        saver.attach(optimizer)
        handle = saver.save(0, {"model": model, "optimizer": optimizer})
        handle.result()
        del handle
        moment = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
        optimizer.state.clear()

        def is_freed() -> bool:
            gc.collect()
            return moment() is None

        until(is_freed, "a moment of the optimizer is freed")  # a thread of the save may be ending


def test_a_change_of_a_view_of_attached_memory_fails_the_save(tmp_path: Path) -> None:
    flat = torch.nn.Parameter(torch.zeros(40_000))
    saver = ckpt.Checkpointer(tmp_path)
    optimizer = torch.optim.SGD([flat], lr=0.1)
    saver.attach(optimizer)
    with failing(SLOW):
        handle = saver.save(0, {"view": flat.detach()[20_000:]})
        flat.data[20_000:].add_(1)
        with pytest.raises(ckpt.StateChanged) as error:
            handle.result()
    one_line(error, "view", "step 0", "step()")
    saver.close()


def test_memory_that_only_begins_with_a_parameter_is_copied_before_save_returns(tmp_path: Path) -> None:
    """A buffer may have the parameters first and then the gradients, which the next backward changes."""
    buffer = torch.zeros(40_000)
    weight = torch.nn.Parameter(buffer[:20_000])
    with failing(SLOW), ckpt.Checkpointer(tmp_path) as saver:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        saver.attach(optimizer)
        handle = saver.save(0, {"buffer": buffer})
        buffer.numpy()[20_100:39_000] = 1
        handle.result()
    assert torch.equal(ckpt.load(tmp_path)["buffer"], torch.zeros(40_000))


@given(st.integers(1, 2000), st.integers(1, 5), st.data())
def test_a_sample_of_a_block_detects_the_leaf_that_changed(size: int, leaves: int, data: st.DataObject) -> None:
    """It finds the leaf wherever its bytes are in the block, and finds none where no leaf changed."""
    arrays = [NumpyLeaf(np.arange(size * (i + 1), dtype=np.int32)) for i in range(leaves)]
    (block,) = plan_blocks(
        [LeafSpec(str(i), x.dtype, x.shape, x.itemsize, x.nbytes, None) for i, x in enumerate(arrays)]
    ).blocks
    before = sample_block(block, arrays)
    staged = np.empty(block.nbytes, np.uint8)
    stage_block(block, arrays, staged)
    assert first_changed_leaf(block, before, staged) is None
    changed = data.draw(st.integers(0, leaves - 1))
    arrays[changed].array += 1
    stage_block(block, arrays, staged)
    assert first_changed_leaf(block, before, staged) == changed


def test_unattached_memory_is_copied_before_save_returns(tmp_path: Path) -> None:
    """This also holds in a state in which other leaves are staged later."""
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


def test_a_donated_jax_array_is_saved_unchanged(tmp_path: Path) -> None:
    """JAX arrays are referenced, not copied: a donated buffer must not be reused during the save."""
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


def test_attach_refuses_an_object_without_a_step_hook(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as saver, pytest.raises(ckpt.CkptError) as error:
        saver.attach(object())
    one_line(error, "object", "torch optimizer")
