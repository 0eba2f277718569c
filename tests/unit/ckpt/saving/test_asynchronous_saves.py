"""Saves in the background: staged in parts, within a memory budget, beside training."""

import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gated_store import MIB, GatedStore
from helpers.processes import until

import ckpt
from ckpt.format.digest import digest_and_cells


def test_a_background_save_returns_when_staged(tmp_path):
    store = GatedStore(tmp_path / "r")
    state = {"a": np.arange(5 * MIB, dtype=np.float32), "b": torch.ones(10), "n": 1}
    expected = state["a"].copy()
    handle = ckpt.save(state, store, step=4, blocking=False)
    assert not handle.done()
    assert ckpt.open(store).steps() == []
    state["a"][:] = -1  # the copy must be independent of the array
    state["b"].zero_()
    state["n"] = 2
    with pytest.raises(TimeoutError, match="step 4"):
        handle.result(timeout=0.01)
    store.gate.set()
    assert handle.result().step == 4
    assert handle.done()
    loaded = ckpt.load(store)
    np.testing.assert_array_equal(loaded["a"], expected)
    assert loaded["b"].tolist() == [1] * 10
    assert loaded["n"] == 1


def test_a_save_in_the_background_leaves_one_processor_to_training(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt.saving.compute_slots.processor_count", lambda: 3)
    lock, hashing, seen = threading.Lock(), [0], []

    def counted(algorithm, data):
        with lock:
            hashing[0] += 1
            seen.append(hashing[0])
        time.sleep(0.005)
        with lock:
            hashing[0] -= 1
        return digest_and_cells(algorithm, data)

    monkeypatch.setattr("ckpt.saving.block_writer.digest_and_cells", counted)
    ckpt.save({f"x{i}": np.full(1 << 20, i, np.float32) for i in range(20)}, tmp_path, blocking=False).result()
    assert len(seen) == 20
    assert max(seen) == 2


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupt_while_the_thread_of_a_save_starts_ends_the_save(tmp_path, monkeypatch, has_begun):
    start, make = threading.Thread.start, threading.Thread._bootstrap
    go = threading.Event()

    def interrupted_start(thread):
        if thread.name != "ckpt-save-2":
            start(thread)
            return
        monkeypatch.undo()
        if not has_begun:
            monkeypatch.setattr(thread, "_bootstrap", lambda: (go.wait(), make(thread)))
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        start(thread)
        signal.raise_signal(signal.SIGINT)

    def saving_threads():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith(("ckpt-save", "ckpt-stage"))]

    with ckpt.Checkpointer(tmp_path, every=None, group=None) as saver:
        saver.save(1, {"a": np.ones(10)})
        monkeypatch.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            saver.save(2, {"a": np.ones(10)})
        go.set()
        until(lambda: not saving_threads())
        saver.save(3, {"a": np.ones(10)})
    assert ckpt.open(tmp_path).steps() == [1, 3]


def test_a_save_beyond_in_flight_waits_for_an_earlier_one(tmp_path):
    store = GatedStore(tmp_path / "r")
    state = {"a": np.zeros(1000)}
    with ckpt.Checkpointer(store, every=1, in_flight=2) as ck:
        first, second = ck.save(0, state), ck.save(1, state)
        third = []
        thread = threading.Thread(target=lambda: third.append(ck.save(2, state)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert not first.done()
        assert not second.done()
        store.gate.set()
        thread.join(600)
        assert third[0].result().step == 2
    assert ckpt.open(store).steps() == [0, 1, 2]


@pytest.mark.slow
def test_a_state_larger_than_the_memory_budget_is_staged_in_parts(tmp_path):
    rng = np.random.default_rng(0)
    state = {f"l{i}": rng.integers(0, 255, 9 * MIB, dtype=np.uint8) for i in range(6)}
    for blocking in (True, False):
        saved = ckpt.save(state, tmp_path / str(blocking), blocking=blocking, memory=20 * MIB)
        if not blocking:
            saved = saved.result()
        loaded = ckpt.load(tmp_path / str(blocking))
        for name, array in state.items():
            np.testing.assert_array_equal(loaded[name], array)


def test_a_budget_below_one_block_still_works(tmp_path):
    state = {"x": np.arange(20 * MIB, dtype=np.uint8)}
    ckpt.save(state, tmp_path / "r", memory=1)
    np.testing.assert_array_equal(ckpt.load(tmp_path / "r")["x"], state["x"])


@pytest.mark.slow
def test_lazy_staging_copies_before_the_optimizer_steps(tmp_path):
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, 1000)

    def train():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    train()
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        ck.attach(optimizer)
        for step in range(5):
            other = np.full(1000, float(step))
            expected = {k: v.clone() for k, v in model.state_dict().items()}
            moments = optimizer.state[model.weight]["exp_avg"].clone()
            handle = ck.save(step, {"model": model, "optimizer": optimizer, "other": other})
            other[:] = -1  # it does not belong to the optimizer, so save copied it before it returned
            train()
            handle.result()
            loaded = ckpt.load(tmp_path / "r", step=step)
            for name, value in expected.items():
                assert torch.equal(loaded["model"][name], value)
            assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], moments)
            assert loaded["other"].tolist() == [step] * 1000
    with pytest.raises(ckpt.CkptError, match="register_step_pre_hook"), ckpt.Checkpointer(tmp_path / "r") as ck:
        ck.attach(object())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_lazy_save_of_cuda_tensors_copies_before_the_optimizer_steps(tmp_path):
    model = torch.nn.Linear(2000, 2000, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 2000, device="cuda")).sum().backward()
    optimizer.step()
    state = {
        "m": model,
        "o": optimizer,
        "t": torch.randn(300, 200, device="cuda").t(),
        "b": torch.randn(5, device="cuda").bfloat16(),
    }
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        ck.attach(optimizer)
        handle = ck.save(0, state)
        optimizer.step()
        handle.result()
    loaded = ckpt.load(tmp_path / "r")
    assert torch.equal(loaded["m"]["weight"], expected["weight"].cpu())
    like = {"t": torch.zeros(300, 200, device="cuda").t(), "b": torch.zeros(5, device="cuda").bfloat16()}
    ckpt.load(tmp_path / "r", like)
    assert torch.equal(like["t"], state["t"])
    assert torch.equal(like["b"], state["b"])


class _InterruptedAtTheEnd(queue.SimpleQueue[Any]):
    """A queue whose reader in one thread is interrupted just after it has taken the sentinel."""

    reader: threading.Thread
    interrupted = False

    def get(self, *how: Any) -> Any:
        item = super().get(*how)
        if item is None and threading.current_thread() is self.reader and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return item


def test_an_interrupt_of_a_writer_that_ends_does_not_block_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writer takes one sentinel. A writer that was interrupted must not take a second one: another would never end."""
    events: list[str] = []

    def saves() -> None:
        try:
            ckpt.save({"w": np.ones(MIB)}, tmp_path / "r")
        except KeyboardInterrupt:
            events.append("interrupted")

    _InterruptedAtTheEnd.reader = thread = threading.Thread(target=saves, daemon=True)
    monkeypatch.setattr(queue, "SimpleQueue", _InterruptedAtTheEnd)
    thread.start()
    thread.join(600)
    assert events == ["interrupted"]
    monkeypatch.undo()
    with pytest.raises(ckpt.CkptError, match="no committed step"):
        ckpt.load(tmp_path / "r")
    ckpt.save({"w": np.ones(3)}, tmp_path / "r")
    assert ckpt.load(tmp_path / "r")["w"].tolist() == [1, 1, 1]
