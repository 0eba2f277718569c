"""Paddle tensors of every type are saved as they are, and filled in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.refusal import refused

import ckpt
from ckpt.adapters.testing import ArrayContract
from ckpt.dtypes import numpy_dtype
from ckpt.state.boxes import Box
from ckpt.state.leaves.paddle import PaddleDeviceLeaf, PaddleLeaf

pytestmark = pytest.mark.essential

TYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128", "bfloat16",
    "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def random_tensor(dtype: str, shape: tuple[int, ...]) -> paddle.Tensor:
    """Return a tensor of random bytes: NaNs with payloads, negative zeros, subnormal numbers."""
    value = paddle.empty(list(shape), dtype=dtype)
    if dtype == "bool":
        return paddle.randint(0, 2, list(shape)).astype("bool")
    leaf = PaddleLeaf(value)
    assert leaf.flat is not None
    leaf.flat[:] = np.random.default_rng(0).integers(0, 256, leaf.nbytes, np.uint8)
    return value


def bytes_of(value: paddle.Tensor) -> bytes:
    return PaddleLeaf(value.contiguous()).flat.tobytes()


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (7,)], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_comes_back_with_its_bytes(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    value = random_tensor(dtype, shape)
    ckpt.save({"x": value}, tmp_path, 0)
    target = paddle.zeros(list(shape)).astype(dtype)
    address = target.data_ptr()
    ckpt.load(tmp_path, like={"x": target})
    new = ckpt.load(tmp_path)["x"]
    assert target.data_ptr() == address
    for loaded in (target, new):
        assert loaded.dtype == value.dtype
        assert list(loaded.shape) == list(shape)
        assert bytes_of(loaded) == bytes_of(value)


def test_a_save_reads_the_memory_of_the_tensor_itself() -> None:
    value = paddle.ones([4])
    leaf = PaddleLeaf(value)
    assert leaf.address() == value.data_ptr()
    value.add_(paddle.ones([4]))
    assert leaf.array.tolist() == [2.0] * 4


def test_the_view_keeps_memory_that_the_tensor_gives_up() -> None:
    value = paddle.full([1 << 20], 7.0)
    leaf = PaddleLeaf(value)
    value._clear()
    paddle.zeros([1 << 20])
    assert (leaf.array == 7).all()


def test_inplace_version_does_not_show_the_change_of_a_step() -> None:
    """The reason why `version` is None: where this fails one day, `inplace_version` can be used."""
    layer = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.Adam(parameters=layer.parameters())
    layer(paddle.ones([1, 2])).sum().backward()
    before = layer.weight.inplace_version
    optimizer.step()
    assert layer.weight.inplace_version == before
    assert PaddleLeaf(layer.weight).version() is None


def test_tied_and_transposed_tensors(tmp_path: Path) -> None:
    weight = paddle.arange(6, dtype="float32").reshape([2, 3])
    turned = paddle.transpose(weight, [1, 0])
    ckpt.save({"a": weight, "b": weight, "t": turned}, tmp_path, 0)
    loaded = ckpt.load(tmp_path)
    assert loaded["a"] is loaded["b"]
    assert loaded["t"].tolist() == weight.numpy().T.tolist()
    layer = paddle.nn.Linear(3, 3)
    other = paddle.nn.Linear(3, 3)
    other.weight = layer.weight
    ckpt.save({"one": layer, "two": other}, tmp_path / "tied", 0)
    loaded = ckpt.load(tmp_path / "tied")
    assert loaded["one"]["weight"] is loaded["two"]["weight"]
    assert loaded["one"]["bias"] is not loaded["two"]["bias"]


def test_parameters_stay_trainable(tmp_path: Path) -> None:
    layer = paddle.nn.Linear(2, 2)
    layer.bias.stop_gradient = True
    ckpt.save(layer.state_dict(), tmp_path, 0)
    loaded = ckpt.load(tmp_path)
    assert type(loaded["weight"]) is type(layer.weight)
    assert not loaded["weight"].stop_gradient
    assert loaded["bias"].stop_gradient
    like = paddle.nn.Linear(2, 2)
    ckpt.load(tmp_path, like=like.state_dict())
    assert not like.weight.stop_gradient
    like(paddle.ones([1, 2])).sum().backward()
    assert like.weight.grad is not None
    assert like.weight.numpy().tolist() == layer.weight.numpy().tolist()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("turned", [False, True])
def test_boxes_of_a_tensor_on_a_device(dtype: str, turned: bool) -> None:
    """The copies in pieces, on tensors of the host: no accelerator is needed for the arithmetic."""
    value = random_tensor(dtype, (4, 6))
    expected = PaddleLeaf(value).array.copy()
    if turned and dtype.startswith("float8"):
        pytest.skip("paddle can't transpose float8 on the host")
    if turned:
        value, expected = paddle.transpose(value, [1, 0]), expected.T
    leaf = PaddleDeviceLeaf(value)
    for box in (Box((1, 1), (2, 3)), Box((0, 0), tuple(value.shape))):
        out = np.empty(box.size * leaf.itemsize, np.uint8)
        leaf.read(box, out)
        assert out.tobytes() == np.ascontiguousarray(expected[box.slices()]).tobytes()
        data = np.arange(box.size * leaf.itemsize, dtype=np.uint8) % (2 if dtype == "bool" else 251)
        leaf.write(box, data)
        expected = expected.copy()
        expected[box.slices()] = data.view(expected.dtype).reshape(box.shape)
        assert np.ascontiguousarray(PaddleLeaf(value).array).tobytes() == np.ascontiguousarray(expected).tobytes()


def sparse() -> Any:
    return paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2])


def cleared() -> Any:
    with paddle.LazyGuard():
        return paddle.nn.Linear(2, 2).weight


@pytest.mark.parametrize(("make", "words"), [(sparse, "indices()"), (cleared, "no memory yet")])
def test_tensors_without_plain_memory_are_refused(tmp_path: Path, make: Any, words: str) -> None:
    with refused(ckpt.UnsupportedLeaf, "leaf x", words):
        ckpt.save({"x": make()}, tmp_path, 0)


def test_wrong_shapes_types_and_keys_are_refused_before_anything_changes(tmp_path: Path) -> None:
    ckpt.save({"x": paddle.ones([2, 3])}, tmp_path, 0)
    for like, words in (
        ({"x": paddle.zeros([3, 2])}, "shape"),
        ({"x": paddle.zeros([2, 3], "float64")}, "dtype"),
        ({"y": paddle.zeros([2, 3])}, "leaf y"),
    ):
        with refused((ckpt.LeafMismatch, ckpt.LeafNotFound), words):
            ckpt.load(tmp_path, like=like)
        assert not next(iter(like.values())).any()


def test_numpy_and_paddle_load_each_other(tmp_path: Path) -> None:
    ckpt.save({"x": paddle.arange(4)}, tmp_path, 0)
    like = {"x": np.zeros(4, np.int64)}
    ckpt.load(tmp_path, like=like)
    assert like["x"].tolist() == [0, 1, 2, 3]
    ckpt.save({"x": like["x"] + 1}, tmp_path, 1)
    target = {"x": paddle.zeros([4], "int64")}
    ckpt.load(tmp_path, like=target)
    assert target["x"].tolist() == [1, 2, 3, 4]


class TestArrays(ArrayContract):
    dtypes = ("bool", "uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "complex64")
    fills_in_place = True

    def array(self, values: Any) -> Any:
        made = paddle.empty(list(values.shape), dtype=str(values.dtype))
        PaddleLeaf(made).array[...] = values.view(PaddleLeaf(made).array.dtype)
        return made

    def values(self, array: Any) -> Any:
        leaf = PaddleLeaf(array)
        return leaf.array.view(numpy_dtype(leaf.dtype)).copy()
