"""Ways of saving: in the background, staged late, compressed, referring to earlier blocks, within a memory budget."""

import errno
import json
import os
import queue
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
from support import assert_same, finish, python

import ckpt
from ckpt.format.codec import CodecMeasurement, CodecTuner, choose_codec
from ckpt.format.digest import digest_and_cells
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.fd_io import DescriptorReader
from ckpt.storage.base.store import Writer
from ckpt.storage.local.directory import LocalStore
from ckpt.training.save_interval import daly_interval_seconds

MIB = 1 << 20


class GatedStore(LocalStore):
    """A real directory whose pack writes wait for a gate, so that a test decides when a save goes on."""

    def __init__(self, path):
        super().__init__(path)
        self.gate = threading.Event()

    def create(self, name, size_hint=0):
        return _GatedWriter(super().create(name, size_hint), self.gate)


class _GatedWriter(Writer):
    def __init__(self, inner, gate):
        self.inner, self.gate = inner, gate

    def append(self, data):
        assert self.gate.wait(60)
        return self.inner.append(data)

    def commit(self):
        return self.inner.commit()

    def abort(self):
        self.inner.abort()


def test_a_background_save_returns_when_staged(tmp_path):
    store = GatedStore(tmp_path / "r")
    state = {"a": np.arange(5 * MIB, dtype=np.float32), "b": torch.ones(10), "n": 1}
    expected = state["a"].copy()
    handle = ckpt.save(state, store, step=4, blocking=False)
    assert not handle.done()
    assert ckpt.open(store).steps() == []
    state["a"][:] = -1  # the copy must be apart
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


def test_at_most_so_many_saves_are_under_way(tmp_path):
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
        thread.join(60)
        assert third[0].result().step == 2
    assert ckpt.open(store).steps() == [0, 1, 2]


def test_a_state_larger_than_the_memory_budget_is_staged_in_pieces(tmp_path):
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
            other[:] = -1  # not the optimizer's, so it was copied before save returned
            train()
            handle.result()
            loaded = ckpt.load(tmp_path / "r", step=step)
            for name, value in expected.items():
                assert torch.equal(loaded["model"][name], value)
            assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], moments)
            assert loaded["other"].tolist() == [step] * 1000
    with pytest.raises(ckpt.CkptError, match="register_step_pre_hook"), ckpt.Checkpointer(tmp_path / "r") as ck:
        ck.attach(object())


CODECS = [
    "none", "auto", None, {"id": "zstd", "level": 3}, {"id": "blosc", "cname": "lz4", "shuffle": 2}, numcodecs.LZ4(),
    numcodecs.Zlib(), {"id": "gzip", "level": 1}, {"id": "bz2", "level": 1}, {"id": "lzma"},
    {"model.*": "none", "*.bf": {"id": "blosc", "cname": "zstd", "shuffle": 1}, "*": numcodecs.Zstd(1)},
]  # fmt: skip


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codecs(tmp_path, codec):
    rng = np.random.default_rng(0)
    state = {
        "model": {"w": rng.integers(0, 4, 500_000).astype(np.float32), "noise": rng.bytes(100_000)},
        "opt": {
            "m": np.zeros(3 * MIB, np.float32),
            "bf": torch.zeros(1000, 7, dtype=torch.bfloat16),
            "odd": np.ones(7, "S5"),
        },
    }
    checkpoint = ckpt.save(state, tmp_path / "r", codec=codec)
    loaded = ckpt.load(tmp_path / "r")
    np.testing.assert_array_equal(loaded["model"]["w"], state["model"]["w"])
    np.testing.assert_array_equal(loaded["opt"]["m"], state["opt"]["m"])
    assert torch.equal(loaded["opt"]["bf"], state["opt"]["bf"])
    assert loaded["model"]["noise"] == state["model"]["noise"]
    assert loaded["opt"]["odd"].tolist() == [b"1"] * 7
    by_name = {leaf.name: leaf for leaf in checkpoint.leaves()}
    compressed = {name for name, leaf in by_name.items() if leaf.codec}
    if codec in ("none", None):
        assert not compressed
    elif codec != "auto":
        assert "opt.m" in compressed
        assert by_name["opt.m"].stored_bytes < 0.1 * by_name["opt.m"].nbytes
        assert "model.noise" not in compressed  # not worth it: stored as it is
    if isinstance(codec, dict) and "*" in codec:
        assert "model.w" not in compressed
        assert "blosc" in by_name["opt.bf"].codec
    assert checkpoint.verify() > 0


def test_auto_compresses_for_slow_stores_only():
    fast, strong = CodecMeasurement("lz4", 0.8, 4e9), CodecMeasurement("zstd", 0.6, 0.6e9)
    assert choose_codec(3e9, [fast, strong]) is None
    assert choose_codec(0.9e9, [fast, strong]) == "lz4"
    assert choose_codec(0.1e9, [fast, strong]) == "zstd"
    assert choose_codec(0.1e9, [CodecMeasurement("zstd", 0.99, 1e9)]) is None
    tuner = CodecTuner()
    zeros = np.zeros(2 * MIB, np.uint8)
    assert tuner.pick("float32", zeros, 4) is None  # nothing known of the store yet
    tuner._written_bytes, tuner._busy_seconds = 100 * MIB, 5.0
    assert "blosc" in tuner.pick("float32", zeros, 4)
    assert tuner.pick("float16", np.frombuffer(np.random.default_rng(0).bytes(MIB), np.uint8), 2) is None


def test_unchanged_blocks_are_referenced(tmp_path):
    state = {"frozen": np.random.default_rng(0).random(2 * MIB), "head": np.zeros(MIB), "step": 0}
    first = ckpt.save(state, tmp_path / "r", step=0, codec="none")
    assert first.commit.written_bytes >= 24 * MIB
    state["head"] += 1
    state["step"] = 1
    second = ckpt.save(state, tmp_path / "r", step=1, codec="none")
    assert second.commit.written_bytes <= 9 * MIB
    assert {leaf.name: leaf.written_in for leaf in second.leaves()} == {"frozen": 0, "head": 1}
    third = ckpt.save(state, tmp_path / "r", step=2)
    assert third.commit.written_bytes == 0
    state["head"] += 1
    ckpt.save(state, tmp_path / "r", step=3, keep=1)  # deletes the steps whose packs it refers to, but not those packs
    assert ckpt.open(tmp_path / "r").steps() == [3]
    loaded = ckpt.load(tmp_path / "r")
    np.testing.assert_array_equal(loaded["frozen"], state["frozen"])
    np.testing.assert_array_equal(loaded["head"], state["head"])
    assert not list((tmp_path / "r/steps/1").glob("**/*.pack"))
    with ckpt.Checkpointer(
        tmp_path / "r", every=1, codec="none"
    ) as ck:  # in one session the blocks are remembered, not read again
        assert ck.save(4, state, blocking=True).result().commit.written_bytes == 0
        state["head"] += 1
        assert 0 < ck.save(5, state, blocking=True).result().commit.written_bytes <= 9 * MIB
    assert ckpt.save(state, tmp_path / "r", step=6, digest="blake3", codec="none").commit.written_bytes >= 24 * MIB
    assert ckpt.open(tmp_path / "r")[6].verify() > 0


def test_a_pack_that_is_gone_is_not_referred_to(tmp_path):
    state = {"a": np.random.default_rng(0).random(MIB)}
    ckpt.save(state, tmp_path / "r", codec="none")
    next((tmp_path / "r").glob("**/*.pack")).unlink()
    checkpoint = ckpt.save(state, tmp_path / "r", codec="none")
    assert checkpoint.commit.written_bytes >= 8 * MIB
    np.testing.assert_array_equal(ckpt.load(tmp_path / "r")["a"], state["a"])


SAVER = """
import json, sys, numpy as np, ckpt
for step in (0, 1):
    state = {"frozen": np.arange(6 << 20, dtype="u2"), "head": np.random.default_rng(step).integers(0, 9, 1 << 20, "u1")}
    ckpt.save(state, sys.argv[1], step=step, codec=json.loads(sys.argv[2]))
"""


@pytest.mark.parametrize("codec", ["none", {"id": "zstd", "level": 1}])
@pytest.mark.parametrize("damage", ["first byte", "last byte", "bad sector"])
def test_a_block_that_rotted_is_not_referred_to(tmp_path, caplog, monkeypatch, codec, damage):
    """What another process has written is read before it is first referred to: else no step may be left that is whole."""
    finish(python(SAVER, tmp_path / "r", json.dumps(codec)))
    newest = ckpt.open(tmp_path / "r")[1]
    state = ckpt.load(tmp_path / "r", step=1)
    [bad] = [row for row in newest.manifest().by_block() if row.leaf == "head"]
    pack = tmp_path / "r" / bad.pack
    assert "steps/1/" in bad.pack
    if damage == "bad sector":

        def read_into(self, position, buffer, inner=DescriptorReader.read_into):
            if self._where.endswith(bad.pack):
                raise StoreError("reading failed") from OSError(errno.EIO, "Input/output error")
            return inner(self, position, buffer)

        monkeypatch.setattr(DescriptorReader, "read_into", read_into)
    else:
        data = bytearray(pack.read_bytes())
        data[bad.position + (0 if damage == "first byte" else bad.stored - 1)] ^= 1
        pack.write_bytes(data)
    saved = ckpt.save(state, tmp_path / "r", step=2, keep=1, codec="none")
    assert ckpt.open(tmp_path / "r").steps() == [2]
    assert saved.commit.written_bytes == MIB, "the head alone: the other blocks are whole, and referred to"
    assert f"{bad.pack}, block at byte {bad.position}, " in caplog.text
    assert "the block is written again, and no new step refers to it" in caplog.text
    assert_same(ckpt.load(tmp_path / "r", step=2, strict=True), state)


def test_packs_roll_over(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt.format.pack.PACK_BYTES", 20 * MIB)
    state = {f"l{i}": np.full(7 * MIB, i, np.uint8) for i in range(12)}
    checkpoint = ckpt.save(state, tmp_path / "r", codec="none")
    assert len(checkpoint.commit.packs) >= 4
    assert all(pack.nbytes <= 20 * MIB for pack in checkpoint.commit.packs)
    loaded = ckpt.load(tmp_path / "r")
    for name, array in state.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_keep_last_and_every(tmp_path):
    with ckpt.Checkpointer(tmp_path / "r", every=1, keep=ckpt.Keep(last=2, every=5)) as ck:
        for step in range(13):
            ck.step(step, {"x": np.full(10, step)})
            ck.wait()
    assert ckpt.open(tmp_path / "r").steps() == [0, 5, 10, 11, 12]


def test_a_step_is_replaced_only_on_request(tmp_path):
    ckpt.save({"x": np.zeros(3)}, tmp_path / "r", step=5)
    with pytest.raises(ckpt.AlreadyExists, match=r"step 5 .* overwrite=True"):
        ckpt.save({"x": np.ones(3)}, tmp_path / "r", step=5)
    ckpt.save({"x": np.ones(3)}, tmp_path / "r", step=5, overwrite=True)
    assert ckpt.load(tmp_path / "r")["x"].tolist() == [1, 1, 1]
    assert len(list((tmp_path / "r/steps/5/pack").iterdir())) == 1


def test_the_loop(tmp_path):
    for begin in (0, 7, 14):
        with ckpt.Checkpointer(tmp_path / "r", every=3, keep=3) as ck:
            state, start = ck.restore({"w": np.zeros(5), "step": -1})
            assert start == (0 if not begin else begin - begin % 3)
            assert state["step"] == start - 1
            for step in range(start, begin + 7):
                state["w"] += 1
                state["step"] = step
                ck.step(step, state, loss=1.0)
    assert ckpt.open(tmp_path / "r").steps() == [14, 17, 20]
    assert ckpt.load(tmp_path / "r")["w"].tolist() == [21.0] * 5
    with ckpt.Checkpointer(tmp_path / "r", every=1) as ck:
        assert ck.step(30, {"w": np.zeros(1)}, loss=float("nan")) is None
        assert ck.step(31, {"w": np.zeros(1)}, loss=torch.tensor(2.0)) is not None
    assert ckpt.open(tmp_path / "r").steps()[-1] == 31


def test_when_a_save_is_due(tmp_path):
    state = {"x": np.zeros(1)}
    with ckpt.Checkpointer(tmp_path / "r", every=timedelta(seconds=0)) as ck:
        assert ck.step(0, state) is not None
    with ckpt.Checkpointer(tmp_path / "r", every=timedelta(hours=1)) as ck:
        assert ck.step(1, state) is None
    with ckpt.Checkpointer(tmp_path / "r") as ck:
        assert ck.step(2, state) is None  # "auto": minutes, for a save that costs so little
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        assert ck.step(3, state) is None
        assert ck.save(3, state).result().step == 3
    with pytest.raises(ckpt.CkptError, match="closed"):
        ck.step(4, state)
    for wrong in ({"every": 0}, {"in_flight": 0}):
        with pytest.raises(ValueError):
            ckpt.Checkpointer(tmp_path / "r", **wrong)


def test_interval_of_daly():
    assert daly_interval_seconds(1, 7200) == pytest.approx(120, rel=0.02)
    assert daly_interval_seconds(60, 7200) == pytest.approx(889, rel=0.02)
    assert daly_interval_seconds(1e9, 60) == 60
    assert daly_interval_seconds(0.1) < daly_interval_seconds(1) < daly_interval_seconds(10)


def test_a_sector_that_cannot_be_read_is_damage(tmp_path, monkeypatch):
    for step in range(2):
        ckpt.save({"x": np.full(100, step)}, tmp_path / "r", step=step)
    bad = next((tmp_path / "r/steps/1/pack").iterdir()).stat().st_ino
    preadv = os.preadv

    def failing(fd, *rest):
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(ckpt.IntegrityError, match=r"leaf x of step 1 .* I/O error"):
        ckpt.load(tmp_path / "r", step=1)
    with pytest.warns(UserWarning, match="older step 0 .* I/O error"):
        assert ckpt.load(tmp_path / "r")["x"].tolist() == [0] * 100


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_cuda(tmp_path):
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
    """A queue whose reader in one thread is interrupted just after it was told of the end."""

    reader: threading.Thread
    interrupted = False

    def get(self, *how: Any) -> Any:
        item = super().get(*how)
        if item is None and threading.current_thread() is self.reader and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return item


def test_an_interrupt_as_the_writers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writer is told of the end once: one that was interrupted takes no other's word, which would wait for ever."""
    said: list[str] = []

    def saves() -> None:
        try:
            ckpt.save({"w": np.ones(MIB)}, tmp_path / "r")
        except KeyboardInterrupt:
            said.append("interrupted")

    _InterruptedAtTheEnd.reader = thread = threading.Thread(target=saves, daemon=True)
    monkeypatch.setattr(queue, "SimpleQueue", _InterruptedAtTheEnd)
    thread.start()
    thread.join(60)
    assert said == ["interrupted"]
    monkeypatch.undo()
    with pytest.raises(ckpt.CkptError, match="no committed step"):
        ckpt.load(tmp_path / "r")
    ckpt.save({"w": np.ones(3)}, tmp_path / "r")
    assert ckpt.load(tmp_path / "r")["w"].tolist() == [1, 1, 1]
