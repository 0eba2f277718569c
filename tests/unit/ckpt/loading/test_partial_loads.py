"""Loads of a part of a step: some leaves, slices of arrays, and reads in chunks."""

import math
import random

import numpy as np
import pytest
import torch
from helpers.values import assert_identical, random_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ckpt
from ckpt.storage.base.fd_io import DescriptorReader
from ckpt.storage.base.store import ALIGNMENT
from ckpt.storage.local.directory import LocalStore


def test_only_the_named_leaves_are_loaded(tmp_path):
    state = {"model": {"w": np.ones(3), "b": np.zeros(2)}, "opt": [np.ones(1), 5, {"x": 1}], "step": 3}
    ckpt.save(state, tmp_path / "r")
    assert_identical(ckpt.load(tmp_path / "r", only="model.*"), {"model": state["model"]})
    assert_identical(ckpt.load(tmp_path / "r", only="model"), {"model": state["model"]})
    assert_identical(
        ckpt.load(tmp_path / "r", only=["*.w", "opt.2.x"]),
        {"model": {"w": state["model"]["w"]}, "opt": [None, None, {"x": 1}]},
    )
    like = {"model": {"w": np.zeros(3), "b": np.full(2, 9.0)}, "opt": [np.zeros(1), 0, {"x": 0}], "step": 0}
    ckpt.load(tmp_path / "r", like, only=["*.w", "step"])
    assert_identical(like, {"model": {"w": np.ones(3), "b": np.full(2, 9.0)}, "opt": [np.zeros(1), 0, {"x": 0}], "step": 3})


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: [x], lambda x: {"inner": x}, ckpt.PerRank, lambda x: ckpt.PerRank([x])]
)
def test_a_selected_leaf_of_an_object_that_the_step_lacks_is_an_error(tmp_path, wrap):
    """Otherwise its weights would stay as they are, without a word."""
    ckpt.save({"enc": torch.nn.Linear(2, 3)}, tmp_path / "r")
    like = {"enc": torch.nn.Linear(2, 3), "model": wrap(torch.nn.Linear(2, 3))}
    with pytest.raises(ckpt.LeafNotFound, match="leaf model of `like` is not in step 0"):
        ckpt.load(tmp_path / "r", like, only="*.weight")
    ckpt.load(tmp_path / "r", like, only="enc.*")
    ckpt.load(tmp_path / "r", {**like, "other": torch.nn.ReLU()}, only="enc.*")


def _with_damaged_newest_step(root, older):
    """Save `older` as step 9, and as step 10 the arrays "a" and "b", of which "b" is damaged."""
    newest = {"a": np.full(10_000, 2.0), "b": np.arange(10_000.0)}
    ckpt.save(older, root, 9, group=None)
    ckpt.save(newest, root, 10, group=None, codec=None, full_every=None)
    (pack,) = (root / "steps/10/pack").iterdir()
    data = bytearray(pack.read_bytes())
    data[data.index(newest["b"].tobytes()) + 7] ^= 1
    pack.write_bytes(data)


@pytest.mark.parametrize("older", [{"a": np.ones(10_000)}, {"a": np.ones(10_000), "b": np.ones(3)}])
def test_an_older_step_that_does_not_fit_is_reported_with_the_damage_of_the_newest(tmp_path, older):
    """The errors of a state that does not fit promise that no array has changed."""
    _with_damaged_newest_step(tmp_path / "r", older)
    like = {"a": np.zeros(10_000), "b": np.zeros(10_000)}
    with pytest.raises(ckpt.IntegrityError, match=r"steps/10/.*; the older step 9 does not fit: .*\bb\b"):
        ckpt.load(tmp_path / "r", like, group=None)
    with pytest.raises((ckpt.LeafNotFound, ckpt.LeafMismatch)):
        ckpt.load(tmp_path / "r", like, step=9, group=None)


@pytest.mark.parametrize("wrap", [lambda x: {"w": x}, lambda x: [{"w": x}], lambda x: ({"w": x},), lambda x: [[], {"w": x}]])
def test_a_selected_leaf_that_the_step_lacks_is_an_error_in_any_container(tmp_path, wrap):
    ckpt.save({"model": {"w": np.ones(3)}}, tmp_path / "r")
    like = {"model": {"w": np.zeros(3)}, "average": wrap(np.zeros(3))}
    with pytest.raises(ckpt.LeafNotFound, match="leaf average of `like` is not in step 0"):
        ckpt.load(tmp_path / "r", like, only="*.w")
    assert_identical(like["model"]["w"], np.zeros(3))
    ckpt.load(tmp_path / "r", like, only="model.*")
    assert_identical(like, {"model": {"w": np.ones(3)}, "average": wrap(np.zeros(3))})


@pytest.mark.slow
def test_only_the_named_leaves_of_an_object_are_loaded(tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    before = other.bias.detach().clone()
    ckpt.save({"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}, tmp_path / "r")
    ckpt.load(tmp_path / "r", {"m": other}, only="m.weight")
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, before)


def test_a_state_that_is_no_dict_is_restored(tmp_path):
    for i, state in enumerate([np.arange(5), [1, 2], 3.5, None, "x", (np.ones(2), 1), {}, torch.ones(3)]):
        ckpt.save(state, tmp_path / str(i))
        assert_identical(ckpt.load(tmp_path / str(i)), state)


def test_reading_a_slice_reads_only_those_bytes(tmp_path):
    array = np.random.default_rng(0).random((4096, 1024), np.float32)
    small = {f"s{i}": np.full((100, 100), i, np.float32) for i in range(50)}
    ckpt.save({"x": array, **small}, tmp_path / "r", codec="none")
    checkpoint = ckpt.open(tmp_path / "r")[0]
    read = []
    original = type(checkpoint.store.open(checkpoint.commit.packs[0].name)).read_into

    def counted(self, position, buffer):
        read.append(len(buffer))
        return original(self, position, buffer)

    reader = type(checkpoint.store.open(checkpoint.commit.packs[0].name))
    reader.read_into = counted
    try:
        np.testing.assert_array_equal(checkpoint["x"][1000:1008], array[1000:1008])
        assert sum(read) <= 2 * 256 << 10
        read.clear()
        np.testing.assert_array_equal(checkpoint["s7"][...], small["s7"])
        assert sum(read) <= 2 * 256 << 10
    finally:
        reader.read_into = original
    with pytest.raises(ckpt.LeafNotFound, match="close to it"):
        checkpoint["s7x"]


@pytest.mark.parametrize("only", [None, "?1"])
def test_blocks_are_prefetched_only_where_they_do_not_follow_the_block_before(tmp_path, monkeypatch, only):
    """The read-ahead of Linux loads blocks that follow each other, into larger pages."""
    ckpt.save({f"{x}{i}": np.full(5 << 20, i, np.float32) for x in "abc" for i in range(3)}, tmp_path, codec="none")
    monkeypatch.setattr("ckpt.storage.local.directory.LocalStore.parallel_reads", 1)
    prefetched, events = [], []
    prefetch, read_into = LocalStore.prefetch, DescriptorReader.read_into

    def record_prefetch(self, name, nbytes, start=0):
        prefetched.append(start)
        events.append(("prefetch", start))
        prefetch(self, name, nbytes, start)

    def record_read(self, position, buffer):
        if self._where.endswith(".pack"):
            events.append(("read", position))
        return read_into(self, position, buffer)

    monkeypatch.setattr(LocalStore, "prefetch", record_prefetch)
    monkeypatch.setattr(DescriptorReader, "read_into", record_read)
    loaded = ckpt.load(tmp_path, only=only)
    assert {name: int(leaf[-1]) for name, leaf in loaded.items()} == {
        f"{x}{i}": i for x in "abc" for i in range(3) if only is None or i == 1
    }
    rows = sorted(ckpt.open(tmp_path).latest().manifest().rows, key=lambda row: row.position)
    read = [row for row in rows if row.leaf in loaded]  # threads write the blocks, in an order that differs
    ends = [row.position + -(-row.stored // ALIGNMENT) * ALIGNMENT for row in read]
    starts_after_gaps = {row.position for end, row in zip(ends, read[1:], strict=False) if row.position != end}
    if only is None:
        assert not prefetched
    else:  # and a block of which the load needs a part
        assert starts_after_gaps
        assert starts_after_gaps <= {*prefetched}
        assert len(prefetched) < len({at for what, at in events if what == "read"})
    for start in prefetched:
        assert events.index(("prefetch", start)) < events.index(("read", start))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slices_equal_those_of_numpy(tmp_path_factory, data):
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40))
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    path = tmp_path_factory.mktemp("r")
    ckpt.save({"x": array}, path / "r", codec=data.draw(st.sampled_from(["none", {"id": "zstd", "level": 1}])))
    lazy = ckpt.open(path / "r")[0]["x"]
    for _ in range(5):
        index = data.draw(hnp.basic_indices(shape, allow_newaxis=False))
        np.testing.assert_array_equal(lazy[index], array[index])
    np.testing.assert_array_equal(np.asarray(lazy), array)


@pytest.mark.parametrize(
    "index", [np.array([0, 1]), [0, 1], (0, np.array([True, False, True, False])), True, np.True_, (..., ...), None, "0", 1.0]
)
def test_an_index_that_is_no_integer_or_slice_is_refused(tmp_path, index):
    lazy = ckpt.save({"x": np.arange(12.0).reshape(3, 4)}, tmp_path, step=1)["x"]
    with pytest.raises(IndexError):
        lazy[index]
    assert lazy[np.int64(1), ..., np.array(2)] == 6.0  # these are integers


def streamed_state():
    """Return leaves that share blocks, fill several chunks, or end within a chunk; one is compressed."""
    draw = random.Random(3)
    sizes = [draw.choice([1, 77, 3000, 40_000, 700_001]) for _ in range(60)] + [3 << 20, (1 << 19) + 5, 10_000_019]
    return {f"x{i:02}": random_bytes("u1", (n,), i) for i, n in enumerate(sizes)} | {
        "matrix": random_bytes("f4", (1500, 1000)),
        "even": np.zeros(3 << 20, np.uint8),  # compressed
    }


def test_a_restore_reads_each_block_in_chunks_into_all_its_targets(tmp_path, monkeypatch):
    state = streamed_state()
    ckpt.save(state, tmp_path, step=1)
    longest = []
    read_into = DescriptorReader.read_into

    def record_read(self, position, buffer):
        if self._where.endswith(".pack"):
            longest.append(len(buffer))
        return read_into(self, position, buffer)

    monkeypatch.setattr(DescriptorReader, "read_into", record_read)
    like = {name: np.full_like(leaf, 7) for name, leaf in state.items()}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.restore(like)
    for name, leaf in state.items():
        np.testing.assert_array_equal(like[name], leaf)
    assert len(longest) > 20
    assert max(longest) < 1 << 20

    # Rows of one rank, columns of another: rows are read chunk by chunk too; columns have no contiguous destination.
    rows, columns = np.zeros((700, 1000), np.float32), np.zeros((1500, 300), np.float32)
    for part, offset in ((rows, (401, 0)), (columns, (0, 650))):
        with ckpt.Checkpointer(tmp_path) as ck:
            ck.restore({"matrix": ckpt.Shard(part, (1500, 1000), offset)})
    np.testing.assert_array_equal(rows, state["matrix"][401:1101])
    np.testing.assert_array_equal(columns, state["matrix"][:, 650:950])


@pytest.mark.slow
@pytest.mark.parametrize("part", [False, True])
def test_a_flipped_byte_in_any_chunk_is_found(tmp_path, part):
    array = random_bytes("f4", (1500, 1000))
    ckpt.save({"matrix": array}, tmp_path, step=1, codec="none")
    (pack,) = tmp_path.glob("steps/1/pack/*.pack")
    good = pack.read_bytes()
    first, last = (401 * 4000, 1101 * 4000) if part else (0, array.nbytes)
    for position in [first, last - 1, *random.Random(5).sample(range(first, last), 12)]:
        pack.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        target = np.zeros_like(array[401:1101] if part else array)
        like = {"matrix": ckpt.Shard(target, array.shape, (401, 0)) if part else target}
        with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.IntegrityError, match="leaf matrix of .*does not match"):
            ck.restore(like)
