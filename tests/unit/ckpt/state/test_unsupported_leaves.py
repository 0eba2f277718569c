"""Leaves that can't be stored raise an error of one line with the leaf and the advice, and nothing is changed."""

from __future__ import annotations

import collections
import io
import json
import random
import socket
import sys
import threading
import types
from collections.abc import Callable
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.refusal import refused
from helpers.refusal import root as root

import ckpt


class Colour(Enum):
    RED = 1


class Slots:
    __slots__ = ("a",)


def masked() -> Any:
    return np.ma.masked_array([1, 2], [0, 1])


def deep_records(levels: int) -> Any:
    kind = np.dtype("f4")
    for _ in range(levels):
        kind = np.dtype([("a", kind)])
    return np.zeros(2, kind)


BAD_LEAVES: dict[str, Callable[[], Any]] = {
    "function": lambda: lambda x: x,
    "method": lambda: [].append,
    "class": lambda: int,
    "module": lambda: json,
    "generator": lambda: (i for i in range(3)),
    "TextIOWrapper": lambda: open(__file__),
    "BytesIO": io.BytesIO,
    "socket": socket.socket,
    "lock": threading.Lock,
    "Thread": threading.Thread,
    "Slots": Slots,
    "Colour": lambda: Colour.RED,
    "datetime": lambda: datetime(2024, 1, 1),
    "deque": lambda: collections.deque([1]),
    "range": lambda: range(3),
    "SystemRandom": random.SystemRandom,
    "defaultdict": lambda: collections.defaultdict(lambda: 5, {"a": 1}),
    "defaultdict of a class": lambda: collections.defaultdict(Slots),
    "Python objects": lambda: np.array([object()], object),
    "object field": lambda: np.zeros(2, [("a", "O"), ("b", "i4")]),
    "masked": masked,
    "a long text of numpy": lambda: np.str_("x" * 3_000_000),
    "elements larger than a block": lambda: np.zeros(2, [("a", "u1", (9 << 20,))]),
    "records in too many levels": lambda: deep_records(51),
    "a scalar of such a record": lambda: deep_records(51)[0],
    "arrays of arrays in a record": lambda: np.zeros(2, [("a", ("f4", (2,)), (3,))]),
    "bfloat16 in a record in a record": lambda: np.zeros(2, [("a", [("b", ml_dtypes.bfloat16)])]),
    "bfloat16 in arrays of records": lambda: np.zeros(2, [("a", [("b", ml_dtypes.bfloat16, (2,))], (3,))]),
}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("kind", BAD_LEAVES)
def test_a_leaf_that_cannot_be_stored_is_refused(root: Path, tmp_path: Path, kind: str, blocking: bool) -> None:
    bad = BAD_LEAVES[kind]()
    state = {"good": np.ones(3), "opt": [{"x": 1, "bad": bad}]}
    with refused(ckpt.UnsupportedLeaf, "leaf opt.0.bad", root=root):
        ckpt.save(state, root, 5, blocking=blocking)
    with refused(ckpt.UnsupportedLeaf, "leaf opt.0.bad"):
        ckpt.save(state, tmp_path / "new", blocking=blocking)
    assert not (tmp_path / "new").exists(), "a refused state has created a repository"
    if hasattr(bad, "close") and kind != "generator":
        bad.close()


@pytest.mark.parametrize(("shape", "start"), [((5, 0), 0), ((5,), -1), ((5,), 3), ((), 0)])
def test_a_flat_shard_outside_its_array_is_refused(root: Path, shape: tuple[int, ...], start: int) -> None:
    with refused(ckpt.UnsupportedLeaf, "leaf w", "does not lie in an array", root=root):
        ckpt.save({"w": ckpt.Shard(np.ones(3), shape, flat=start)}, root)


@pytest.mark.parametrize("offset", [(2, 0), 5, np.int64(5), [0, (2, 0)]])
def test_several_local_arrays_need_several_offsets(offset: object) -> None:
    with refused(ckpt.InvalidArgument, "offset=", "give a list of offsets, as [(2, 0)]"):
        ckpt.Shard([np.zeros((2, 3)), np.zeros((2, 3))], (6, 3), offset)  # type: ignore[arg-type]


def test_an_offset_of_too_few_numbers_is_refused(root: Path) -> None:
    with refused(ckpt.UnsupportedLeaf, "leaf w", "at [0]", "each must have 2 numbers", root=root):
        ckpt.save({"w": ckpt.Shard(np.zeros((2, 10)), (6, 10), (0,))}, root)


def test_a_state_that_is_itself_no_leaf_is_refused(root: Path) -> None:
    with refused(ckpt.UnsupportedLeaf, "(root)", "function", root=root):
        ckpt.save(lambda: 1, root, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda t: t.eye(3).to_sparse(), "indices and values"),
        (lambda t: t.eye(3).to_sparse_csr(), "indices and values"),
        (lambda t: t.empty(3, device="meta"), "meta"),
        (lambda t: t.quantize_per_tensor(t.ones(3), 0.1, 0, t.qint8), "scales"),
        (lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)]), "unbind()"),
        (lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)], layout=t.jagged), "unbind()"),
        (lambda t: t.nn.UninitializedParameter(), "run the module once"),
        (lambda t: wrapped(t), "bytes of a Wrapper cannot be reached"),
        (lambda t: fake(t), "bytes of a FakeTensor cannot be reached"),
        (lambda t: masked_tensor(t), "bytes of a MaskedTensor cannot be reached"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_memory_are_refused(root: Path, make: Callable[[Any], Any], word: str) -> None:
    torch = pytest.importorskip("torch")
    bad = make(torch)
    with refused(ckpt.UnsupportedLeaf, "leaf m.w", word, root=root):
        ckpt.save({"m": {"w": bad}}, root, 5)
    with refused(ckpt.LeafMismatch, "leaf embed of `like` cannot be filled", word, root=root):
        ckpt.load(root, {"embed": bad})


def test_a_lazy_module_is_refused(root: Path) -> None:
    torch = pytest.importorskip("torch")
    with refused(ckpt.UnsupportedLeaf, "leaf model.weight", "lazy module", "run", root=root):
        ckpt.save({"model": torch.nn.LazyLinear(3)}, root, 5)


def wrapped(torch: Any) -> Any:
    """Return a tensor that has no memory of its own."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            raise RuntimeError(f"{function} is not for me,\nnor is anything else")

    return Wrapper(torch.ones(3))


def fake(torch: Any) -> Any:
    """Return a tensor that only has a shape and a type."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def masked_tensor(torch: Any) -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(torch.arange(3.0), torch.tensor([True, False, True]))


def test_a_traced_jax_value_is_refused(root: Path) -> None:
    jax = pytest.importorskip("jax")
    with refused(ckpt.UnsupportedLeaf, "leaf w", "outside of jit", root=root):
        jax.jit(lambda x: ckpt.save({"w": x}, root, 5))(jax.numpy.ones(3))


def test_a_key_that_cannot_be_stored_is_refused(root: Path) -> None:
    for key in (object(), Colour.RED, frozenset([1]), np.float32(1)):
        with refused(ckpt.UnsupportedLeaf, "leaf m", "key", root=root):
            ckpt.save({"m": {key: 1}}, root, 5)
    for state in ({1 << 20_000: 1}, {(1, 1 << 20_000): 1}, {1 << 20_000, "a"}):
        with refused(ckpt.UnsupportedLeaf, "leaf m", "integer", root=root):
            ckpt.save({"m": state}, root, 5)
    with refused(ckpt.UnsupportedLeaf, "UTF-8", root=root):  # half of a surrogate pair has no encoding
        ckpt.save({"m\ud800": np.ones(3)}, root, 5)


def test_a_state_that_contains_itself_is_refused(root: Path) -> None:
    for inner in ([], {}, collections.OrderedDict()):
        state: Any = {"a": {"b": inner}}
        if isinstance(inner, list):
            inner.append(state)
        else:
            inner["up"] = state
        with refused(ckpt.UnsupportedLeaf, "leaf a.b", "contains itself", root=root):
            ckpt.save(state, root, 5)


def test_a_state_that_is_nested_too_deeply_is_refused(root: Path) -> None:
    state: Any = 1
    for _ in range(5000):
        state = [state]
    with refused(ckpt.UnsupportedLeaf, "nested too deeply", root=root):
        ckpt.save(state, root, 5)


def test_a_save_succeeds_while_another_thread_imports_masked_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy.ma", types.ModuleType("numpy.ma"))  # as in the middle of the import
    ckpt.save({"a": np.arange(3)}, tmp_path, step=0)
    monkeypatch.undo()
    assert ckpt.load(tmp_path)["a"].tolist() == [0, 1, 2]
