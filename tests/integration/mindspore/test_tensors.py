"""MindSpore tensors and parameters of every type are saved as they are, and filled in the memory that compiled steps use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from helpers.refusal import refused
from mindspore import nn

import ckpt
from ckpt.adapters.testing import ArrayContract
from ckpt.dtypes import numpy_dtype
from ckpt.state.leaves import mindspore as leaves
from ckpt.state.leaves.mindspore import CopiedTensorLeaf, HostTensorLeaf

TYPES = (
    "float32", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float64",
    "bfloat16", "complex64", "complex128",
)  # fmt: skip


@pytest.fixture(params=["pynative", "graph"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    ms.set_context(mode=ms.GRAPH_MODE if request.param == "graph" else ms.PYNATIVE_MODE)
    yield request.param
    ms.set_context(mode=ms.PYNATIVE_MODE)


class TestArrays(ArrayContract):
    dtypes = TYPES
    fills_in_place = True

    def array(self, values: Any) -> Any:
        return leaves._new_tensor(values.copy(), str(values.dtype))

    def values(self, array: Any) -> Any:
        leaf = HostTensorLeaf(array)
        return leaf.array.view(numpy_dtype(leaf.dtype)).copy()


class TestParameters(TestArrays):
    dtypes = ("float32", "bfloat16", "int64")

    def array(self, values: Any) -> Any:
        return ms.Parameter(super().array(values), name="w")


def training() -> tuple[dict[str, Any], Callable[[], bytes]]:
    """Return the parameters of a net and its optimizer by name, and a function that trains one step and returns the loss."""
    ms.set_seed(3)
    net = nn.SequentialCell(nn.Dense(4, 4), nn.Tanh(), nn.Dense(4, 2))
    optimizer = nn.Adam(net.trainable_params(), learning_rate=0.1)
    random = np.random.default_rng(0)
    x, y = (ms.Tensor(random.standard_normal((3, size)).astype(np.float32)) for size in (4, 2))

    def forward(x: Any, y: Any) -> Any:
        return ((net(x) - y) ** 2).mean()

    gradient = ms.value_and_grad(forward, None, optimizer.parameters)

    def step() -> bytes:
        loss, gradients = gradient(x, y)
        optimizer(gradients)
        return bytes(loss.asnumpy().tobytes())

    return {"net": net, "optimizer": optimizer}, step


def test_a_load_after_the_first_step_reaches_the_compiled_steps(tmp_path: Path, mode: str) -> None:
    state, step = training()
    step()
    ckpt.save(state, tmp_path, 1)
    expected = [step() for _ in range(3)]
    for _ in range(2):
        ckpt.load(tmp_path, like=state)
        assert [step() for _ in range(3)] == expected


def test_set_data_does_not_reach_the_compiled_steps() -> None:
    """The reason why a load does not use it. In MindSpore 2.10 this also holds in graph mode, in 2.7 it does not."""
    state, step = training()
    step()
    parameters = [p for cell in state.values() for _, p in cell.parameters_and_names()]
    values = [p.asnumpy().copy() for p in parameters]
    expected = [step() for _ in range(3)]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.set_data(ms.Tensor(value.copy()))
    assert [step() for _ in range(3)] != expected


def test_tensors_of_a_device_are_filled_by_copies(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of an accelerator, on the host: copies instead of its memory."""
    monkeypatch.setattr(leaves, "_is_on_host", lambda: False)
    state, step = training()
    step()
    assert isinstance(leaves.as_leaf(state["net"].trainable_params()[0]), CopiedTensorLeaf)
    ckpt.save(state, tmp_path, 1)
    expected = [step() for _ in range(3)]
    for _ in range(2):
        ckpt.load(tmp_path, like=state)
        assert [step() for _ in range(3)] == expected


def test_a_save_reads_the_memory_of_the_tensor_itself() -> None:
    value = ms.Tensor(np.ones(4, np.float32))
    leaf = HostTensorLeaf(value)
    value.asnumpy()[...] = 2
    assert leaf.array.tolist() == [2.0] * 4
    assert leaf.address() is not None


def test_parameters_keep_name_and_gradient(tmp_path: Path) -> None:
    saved = {"a": ms.Parameter(ms.Tensor([1.0, 2.0]), name="one"), "b": ms.Parameter(ms.Tensor([3.0]), "two", False)}
    ckpt.save(saved, tmp_path, 0)
    loaded = ckpt.load(tmp_path)
    for key, parameter in saved.items():
        assert isinstance(loaded[key], ms.Parameter)
        assert (loaded[key].name, loaded[key].requires_grad) == (parameter.name, parameter.requires_grad)
        assert loaded[key].asnumpy().tolist() == parameter.asnumpy().tolist()


def test_a_transposed_tensor_has_the_values_that_the_user_sees(tmp_path: Path) -> None:
    value = ms.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).T
    ckpt.save({"t": value}, tmp_path, 0)
    assert ckpt.load(tmp_path)["t"].asnumpy().tolist() == value.asnumpy().tolist()
    like = {"t": ms.Tensor(np.zeros((2, 3), np.float32)).T}
    ckpt.load(tmp_path, like=like)
    assert like["t"].asnumpy().tolist() == value.asnumpy().tolist()


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_view_sets_the_elements_of_its_tensor(tmp_path: Path, first: int, dtype: str) -> None:
    def tensor(values: list[int]) -> Any:
        return ms.Tensor(values, ms.int32).astype(getattr(ms, "bool_" if dtype == "bool" else dtype))

    ckpt.save({"view": tensor([1, 0, 1])}, tmp_path, 0)
    base = tensor([0] * 6)
    like = {"view": base[first : first + 3]}
    ckpt.load(tmp_path, like=like)
    assert like["view"].astype(ms.int32).asnumpy().tolist() == [1, 0, 1]
    expected = [0] * first + [1, 0, 1] + [0] * (3 - first)
    assert base.astype(ms.int32).asnumpy().tolist() == expected


def test_a_view_of_bfloat16_is_filled_or_refused(tmp_path: Path) -> None:
    ckpt.save({"view": ms.Tensor([1.0, 2.0], ms.bfloat16)}, tmp_path, 0)
    base = ms.Tensor([0.0] * 4, ms.bfloat16)
    whole = {"view": ms.Tensor([0.0, 0.0], ms.bfloat16)}
    ckpt.load(tmp_path, like=whole)
    assert whole["view"].astype(ms.float32).asnumpy().tolist() == [1, 2]
    if leaves.views_have_addresses():
        ckpt.load(tmp_path, like={"view": base[1:3]})
        assert base.astype(ms.float32).asnumpy().tolist() == [0, 1, 2, 0]
    else:
        with refused(ckpt.LeafMismatch, "leaf view", "store the whole tensor"):
            ckpt.load(tmp_path, like={"view": base[1:3]})


def test_the_result_of_a_kernel_is_filled(tmp_path: Path) -> None:
    ckpt.save({"sum": ms.Tensor([1.0, 2.0])}, tmp_path, 0)
    like = {"sum": ms.ops.ones((2,), ms.float32) + 3}
    ckpt.load(tmp_path, like=like)
    assert (like["sum"] * 2).asnumpy().tolist() == [2, 4]
    assert like["sum"].asnumpy().tolist() == [1, 2]


def _sparse() -> Any:
    return ms.COOTensor(ms.Tensor([[0, 1]], ms.int32), ms.Tensor([1.0]), (2, 2))


def _compressed() -> Any:
    return ms.CSRTensor(ms.Tensor([0, 1], ms.int32), ms.Tensor([0], ms.int32), ms.Tensor([1.0]), (1, 2))


REFUSED = {
    "strings": (lambda: ms.Tensor(np.array(["a", "b"])), "list of str"),
    "float8": (lambda: ms.Tensor(np.zeros(2, np.uint8), ms.float8_e4m3fn), "Float8E4M3FN"),
    "coo": (_sparse, "indices"),
    "csr": (_compressed, "indptr"),
    "lazy": (lambda: ms.common.initializer.initializer("normal", [2]), "init_data()"),
    "dataset": (lambda: ms.dataset.NumpySlicesDataset([1, 2]), "create_dict_iterator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_without_plain_bytes_are_refused_by_name(tmp_path: Path, name: str) -> None:
    make, words = REFUSED[name]
    with refused(ckpt.UnsupportedLeaf, "leaf x", words):
        ckpt.save({"x": make()}, tmp_path, 0)


def test_elements_of_a_saved_tensor_are_read_by_their_index(tmp_path: Path) -> None:
    """MindSpore needs numpy 1, where some names of numpy 2 are missing."""
    saved = ckpt.save({"x": ms.Tensor(np.arange(6.0).reshape(2, 3))}, tmp_path, 0)["x"]
    assert saved[1, 2] == 5
    with pytest.raises(IndexError):
        saved[np.True_]


def test_wrong_shapes_types_and_keys_are_refused_before_anything_changes(tmp_path: Path) -> None:
    ckpt.save({"x": ms.Tensor(np.ones((2, 3), np.float32))}, tmp_path, 0)
    for like, words in (
        ({"x": ms.Tensor(np.zeros((3, 2), np.float32))}, "shape"),
        ({"x": ms.Tensor(np.zeros((2, 3), np.float64))}, "dtype"),
        ({"y": ms.Tensor(np.zeros((2, 3), np.float32))}, "leaf y"),
    ):
        with refused((ckpt.LeafMismatch, ckpt.LeafNotFound), words):
            ckpt.load(tmp_path, like=like)
        assert not next(iter(like.values())).asnumpy().any()
