"""`iterate_weights` yields the tensors of a model in the order of the file, verified, with bounded memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.flipped_bits import flip_bit_of_leaf

import ckpt
from ckpt.adapters import weights
from ckpt.adapters.weights import iterate_weights


@lru_cache(maxsize=4)
def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of several types and sizes: smaller than a block, of several blocks, and without elements."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(1000, 1000, generator=generator).bfloat16(),
        "layers.0.weight": torch.randn(900, 5000, generator=generator),
        "layers.0.bias": torch.randn(7, generator=generator).double(),
        "layers.1.weight": torch.randn(1024, 2048, generator=generator).half(),
        "layers.1.scale": torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn),
        "count": torch.tensor(12345),
        "nothing": torch.empty(0, 5),
        "mask": torch.rand(33, generator=generator) > 0.5,
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("codec", ["none", {"id": "zstd", "level": 1}])
def test_the_tensors_are_those_that_were_saved(tmp_path: Path, codec) -> None:
    ckpt.save(model(), tmp_path, codec=codec)
    assert_equal(dict(iterate_weights(tmp_path)), model())


def test_a_limit_smaller_than_each_tensor_changes_nothing(tmp_path: Path) -> None:
    ckpt.save(model(), tmp_path)
    assert_equal(dict(iterate_weights(tmp_path, max_bytes=1)), model())


def test_the_newest_step_or_the_given_one(tmp_path: Path) -> None:
    for step in (1, 2):
        ckpt.save(model(step), tmp_path, step)
    assert_equal(dict(iterate_weights(tmp_path)), model(2))
    assert_equal(dict(iterate_weights(tmp_path, 1)), model(1))


def test_the_url_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save(model(), tmp_path)
    monkeypatch.setenv("CKPT_DIR", str(tmp_path))
    assert_equal(dict(iterate_weights()), model())


@pytest.mark.parametrize("prefix", ["model", "model."])
def test_a_prefix_selects_the_model(tmp_path: Path, prefix: str) -> None:
    network = torch.nn.Linear(4, 5)
    ckpt.save({"model": network, "models": torch.zeros(3), "optimizer": {"m": torch.ones(2)}, "step": 3}, tmp_path)
    assert_equal(dict(iterate_weights(tmp_path, prefix=prefix)), dict(network.state_dict()))


def test_a_state_with_parts_needs_a_prefix(tmp_path: Path) -> None:
    ckpt.save({"model": model(), "optimizer": {"m": torch.ones(2)}}, tmp_path)
    with pytest.raises(
        ckpt.InvalidArgument, match=r"has the parts model, optimizer: name that of the model, as in prefix='model'"
    ):
        iterate_weights(tmp_path)


def test_an_unknown_prefix_is_refused(tmp_path: Path) -> None:
    ckpt.save({"model": model()}, tmp_path)
    with pytest.raises(ckpt.LeafNotFound, match="no array of step 0 .* is below 'module'"):
        iterate_weights(tmp_path, prefix="module")


def test_names_are_replaced(tmp_path: Path) -> None:
    ckpt.save(model(), tmp_path)
    found = dict(iterate_weights(tmp_path, rename={r"^layers\.": "blocks."}))
    assert_equal(found, {name.replace("layers.", "blocks."): tensor for name, tensor in model().items()})
    with pytest.raises(ckpt.InvalidArgument, match="rename gives .* and .* one name, x"):
        iterate_weights(tmp_path, rename=lambda name: "x")


def test_tied_weights_have_each_of_their_names(tmp_path: Path) -> None:
    shared = torch.randn(5, 4)
    ckpt.save({"embed": shared, "head": shared}, tmp_path)
    found = dict(iterate_weights(tmp_path))
    assert_equal(found, {"embed": shared, "head": shared})
    assert found["embed"].data_ptr() == found["head"].data_ptr()


@pytest.mark.parametrize("world", [2, 3, 20])
def test_parts_are_the_whole(tmp_path: Path, world: int) -> None:
    ckpt.save(model(), tmp_path)
    parts = [dict(iterate_weights(tmp_path, rank=rank, world=world)) for rank in range(world)]
    assert sum(map(len, parts)) == len(model())
    assert_equal(
        {name: tensor for part in parts for name, tensor in part.items()} | {}, {n: model()[n] for p in parts for n in p}
    )


def test_parts_have_about_equal_bytes(tmp_path: Path) -> None:
    ckpt.save({f"{i:02}": torch.randn(100, 100) for i in range(40)}, tmp_path)
    assert [len(dict(iterate_weights(tmp_path, rank=rank, world=4))) for rank in range(4)] == [10, 10, 10, 10]


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_of_the_world_is_refused(tmp_path: Path, rank: int, world: int) -> None:
    with pytest.raises(ckpt.InvalidArgument, match="give a rank from 0"):
        iterate_weights(tmp_path, rank=rank, world=world)


def test_an_empty_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(ckpt.StepNotFound):
        iterate_weights(tmp_path)
    ckpt.save(model(), tmp_path, 3)
    with pytest.raises(ckpt.StepNotFound, match="has no committed step 4; it has step 3"):
        iterate_weights(tmp_path, 4)


def test_a_damaged_byte_is_found(tmp_path: Path) -> None:
    """The tensors that are yielded before it are intact."""
    checkpoint = ckpt.save(model(), tmp_path, codec="none")
    flip_bit_of_leaf(checkpoint, "layers.1.weight")
    found: dict[str, torch.Tensor] = {}
    with pytest.raises(ckpt.IntegrityError, match=r"leaf layers\.1\.weight of step 0"):
        for name, tensor in iterate_weights(tmp_path, max_bytes=1):
            found[name] = tensor  # noqa: PERF403
    assert "layers.1.weight" not in found
    assert_equal(found, {name: model()[name] for name in found})


def test_a_missing_pack_is_found(tmp_path: Path) -> None:
    checkpoint = ckpt.save(model(), tmp_path)
    os.remove(tmp_path / checkpoint.commit.packs[0].name)
    with pytest.raises(ckpt.IntegrityError, match="is missing"):
        list(iterate_weights(tmp_path))


def test_other_frameworks_arrays_become_tensors(tmp_path: Path) -> None:
    ckpt.save({"w": np.arange(6, dtype=np.int32).reshape(2, 3)}, tmp_path)
    assert_equal(dict(iterate_weights(tmp_path)), {"w": torch.arange(6, dtype=torch.int32).reshape(2, 3)})


def test_a_type_that_torch_lacks_is_refused(tmp_path: Path) -> None:
    ckpt.save({"w": np.array(["a", "b"])}, tmp_path)
    with pytest.raises(ckpt.LeafMismatch, match="leaf w of step 0 .* can't be a tensor: the installed torch .* has no dtype"):
        iterate_weights(tmp_path)


def test_the_tensors_are_read_in_the_order_of_the_file_and_ahead_up_to_the_limit(tmp_path: Path, made: list[int]) -> None:
    state = {f"{i:02}": torch.randn(1 << 22) for i in range(12)}  # 16 MiB each
    saved = ckpt.save(state, tmp_path, codec="none")
    rows = saved.manifest().rows  # the tensors stand in the order in which their writes began
    names = []
    for number, (name, _) in enumerate(iterate_weights(tmp_path, max_bytes=64 << 20)):
        names.append(name)
        assert sum(made) <= (number + 1) * (16 << 20) + (64 << 20)
    assert names == list(dict.fromkeys(row.leaf for row in sorted(rows, key=lambda row: (row.pack, row.position))))
    assert sum(made) == 12 * (16 << 20)


def test_a_consumer_that_stops_leaves_no_thread(tmp_path: Path) -> None:
    ckpt.save(model(), tmp_path)
    stream: Iterator[tuple[str, torch.Tensor]] = iterate_weights(tmp_path)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-read")]


def addresses(stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield what a stream yields, with the address of each tensor."""
    for name, tensor in stream:
        yield name, tensor.data_ptr(), tensor


def test_memory_of_dropped_tensors_is_used_again(tmp_path: Path) -> None:
    state = {f"{i:02}": torch.full((1 << 21,), float(i)) for i in range(40)}  # 8 MiB each
    ckpt.save(state, tmp_path)
    found = set()
    for name, address, tensor in addresses(iterate_weights(tmp_path, max_bytes=64 << 20)):
        assert tensor.equal(state[name])
        found.add(address)
    assert len(found) <= 12


@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t[5:9], lambda t: t.numpy()[3:], lambda t: torch.nn.Parameter(t)])
def test_memory_of_kept_tensors_is_not_used_again(tmp_path: Path, keep: Callable[[torch.Tensor], Any]) -> None:
    """Every third tensor is kept, as a whole or by a view, until the stream has ended; the sizes differ."""
    state = {f"{i:02}": torch.full(((1 << 20) + 100_000 * (i % 7),), float(i)) for i in range(40)}
    ckpt.save(state, tmp_path)
    kept = {name: keep(t) for name, t in iterate_weights(tmp_path, max_bytes=64 << 20) if int(name) % 3 == 0}
    assert len(kept) == 14
    for name, value in kept.items():
        assert (value == int(name)).all()
        assert value.shape == keep(state[name]).shape


def test_a_forked_child_sees_the_tensors(tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(1 << 22)}, tmp_path)
    ((_, tensor),) = iterate_weights(tmp_path)
    if (child := os.fork()) == 0:
        os._exit(0 if bool(tensor[0] == 1) and bool(tensor[-1] == 1) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all tensors that are made."""
    found: list[int] = []
    make = weights._new_tensor

    def noted(saved, memory):
        leaf = make(saved, memory)
        found.append(leaf.nbytes)
        return leaf

    monkeypatch.setattr(weights, "_new_tensor", noted)
    return found
