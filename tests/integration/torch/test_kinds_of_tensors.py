"""Every kind of tensor is loaded as the user saw it at the save, into new memory and in place, or is refused at save by
name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.refusal import refused

import ckpt

torch = pytest.importorskip("torch")

State = dict[str, Any]


def numbers(n: int = 12, dtype: Any = None) -> Any:
    return torch.arange(1, n + 1, dtype=dtype or torch.float32)


def complex_numbers() -> Any:
    return torch.complex(numbers(6), numbers(6) + 0.5)


def conjugate() -> State:
    x = complex_numbers()
    return {"x": x, "c": x.conj()}


def conjugate_first() -> State:
    x = complex_numbers()
    return {"c": x.conj(), "x": x}


def imaginary_part_of_a_conjugate() -> State:
    x = complex_numbers()
    return {"i": x.imag, "n": x.conj().imag}


def negative() -> State:
    x = numbers()
    return {"x": x, "n": torch._neg_view(x)}


def conjugate_and_negative() -> State:
    x = complex_numbers()
    return {"x": x, "cn": torch._neg_view(x.conj()), "h": x.reshape(2, 3).mH}


def half_precision_conjugate() -> State:
    x = complex_numbers().to(torch.complex32)
    return {"x": x, "c": x.conj()}


def seen_as_other_types() -> State:
    x = numbers()
    return {"x": x, "i": x.view(torch.int32), "b": x.view(torch.uint8), "h": x.view(torch.bfloat16)}


def real_view() -> State:
    x = complex_numbers()
    return {"x": x, "r": torch.view_as_real(x), "i": x.imag, "c": torch.view_as_real(x.conj().resolve_conj())}


def other_strides() -> State:
    x = numbers().reshape(3, 4)
    return {"x": x, "t": x.T, "f": x.flatten(), "s": x[:, ::2], "one": x.as_strided((3, 4), (4, 1), 0)}


def overlapping() -> State:
    x = numbers()
    return {"a": x, "b": x[:5], "c": x[3:9], "other": numbers(), "part": x[8:].reshape(2, 2)}


def overlapping_through_a_third() -> State:
    x = numbers()
    return {"a": x[:5], "b": x[7:], "c": x[4:8]}


def expanded() -> State:
    return {"e": torch.full((1, 3), 7.0).expand(4, 3), "u": numbers().unfold(0, 4, 2)}


def expanded_beside_its_base() -> State:
    x = numbers(3)
    return {"x": x, "e": x.expand(5, 3)}


def parameters() -> State:
    p = torch.nn.Parameter(numbers())
    return {"p": p, "d": p.detach(), "half": p.detach()[:6], "tied": p}


def beside_numpy() -> State:
    x = numbers()
    return {"x": x, "n": x.numpy(), "back": x.numpy()[::-1]}


def tied() -> State:
    x = numbers()
    return {"a": x, "b": x, "c": x.view(12)}


def without_elements() -> State:
    x = numbers()
    return {"none": x[:0], "x": x, "empty": torch.empty(0, 3), "gone": torch.empty(3)[3:]}


def without_axes() -> State:
    x = numbers()
    return {"x": x, "first": x[0], "second": x[1], "z": complex_numbers()[1].conj()}


def inference() -> State:
    with torch.inference_mode():
        return {"x": numbers(), "y": numbers()[:5]}


def of_ranks() -> State:
    x = numbers()
    return {"x": x, "mine": ckpt.PerRank(x), "some": ckpt.PerRank(x[:4])}


def subclass() -> State:
    return {"x": numbers().as_subclass(Plain)}


class Plain(torch.Tensor):
    """A tensor subclass without data of its own."""


KEPT: dict[str, Callable[[], State]] = {
    f.__name__: f
    for f in (
        conjugate, conjugate_first, imaginary_part_of_a_conjugate, negative, conjugate_and_negative, half_precision_conjugate,
        seen_as_other_types, real_view, other_strides, overlapping, overlapping_through_a_third, expanded,
        expanded_beside_its_base, parameters, beside_numpy, tied, without_elements, without_axes, of_ranks, subclass,
    )
}  # fmt: skip
DTYPES = [
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128", "complex32", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "bits8", "bits16", "int4", "uint3",
]  # fmt: skip


def of_type(name: str) -> Callable[[], State]:
    return lambda: {"x": (torch.arange(48, dtype=torch.uint8) % (2 if name == "bool" else 251)).view(getattr(torch, name))}


KEPT |= {name: of_type(name) for name in DTYPES if hasattr(torch, name)}


def seen(value: Any) -> bytes:
    """Return the elements of an array as the user sees them, as bytes in C order, with type and shape."""
    if isinstance(value, ckpt.PerRank):
        return seen(value.value)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    raw = torch.empty(plain.nbytes, dtype=torch.uint8)
    if plain.nbytes:
        raw = plain.reshape(-1).view(torch.uint8)
    return f"{value.dtype} {tuple(value.shape)}".encode() + raw.numpy().tobytes()


def all_seen(state: State) -> dict[str, bytes]:
    return {name: seen(value) for name, value in state.items()}


def scramble(state: State) -> None:
    """Write other values to all of the memory, through the views themselves."""
    for value in state.values():
        value = value.value if isinstance(value, ckpt.PerRank) else value
        if isinstance(value, np.ndarray):
            value[...] = 99
            continue
        with torch.no_grad():
            storage = value.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x3C)


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_tensor_loads_with_the_values_that_the_user_saw(tmp_path: Path, kind: str) -> None:
    state = KEPT[kind]()
    want = all_seen(state)
    ckpt.save(state, tmp_path, 0)
    assert all_seen(ckpt.load(tmp_path)) == want, "new tensors have other values"
    objects = {name: id(value) for name, value in state.items()}
    scramble(state)
    loaded = ckpt.load(tmp_path, state)
    assert all_seen(state) == want, "tensors filled in place have other values"
    assert {name: id(value) for name, value in loaded.items()} == objects
    separate = {name: value if isinstance(value, ckpt.PerRank) else copy_of(value) for name, value in KEPT[kind]().items()}
    scramble(separate)
    ckpt.load(tmp_path, separate)
    assert all_seen(separate) == want, "tensors with separate memory have other values"


def copy_of(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else torch.empty(value.shape, dtype=value.dtype)


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_checkpointer_restores_what_it_saved(tmp_path: Path, kind: str) -> None:
    state = KEPT[kind]()
    want = all_seen(state)
    with ckpt.Checkpointer(tmp_path) as saver:
        saver.save(0, state)
        saver.wait()
        scramble(state)
        saver.restore(state)
    assert all_seen(state) == want


def test_inference_tensors_load_into_new_memory_and_in_place(tmp_path: Path) -> None:
    state = inference()
    want = all_seen(state)
    ckpt.save(state, tmp_path, 0)
    assert all_seen(ckpt.load(tmp_path)) == want
    scramble(state)
    ckpt.load(tmp_path, state)
    assert all_seen(state) == want


def test_views_load_only_into_memory_shared_in_the_same_way(tmp_path: Path) -> None:
    """The saved views agree where they shared memory; for other overlaps nothing is known, so the load is refused."""
    ckpt.save(overlapping(), tmp_path, 0)
    x = numbers()
    for like in (
        {"a": x, "b": x[1:6]}, {"a": x, "b": x[:10:2]}, {"b": x[:5], "c": x[4:10]}, {"a": x, "other": x},
        {"a": x, "b": x[:5], "other": x},
    ):  # fmt: skip
        before = x.clone()
        with refused(ckpt.LeafMismatch, "same memory", root=tmp_path):
            ckpt.load(tmp_path, like)
        assert torch.equal(x, before)
    y = torch.zeros(20)
    ckpt.load(tmp_path, {"a": y[4:16], "b": y[4:9]})  # at other offsets, but shared in the same way
    assert y[4:16].tolist() == list(range(1, 13))
    ckpt.save(expanded(), tmp_path, 1)
    with refused(ckpt.LeafMismatch, "leaf e", "share memory", root=tmp_path):
        ckpt.load(tmp_path, {"e": torch.zeros(4, 1).expand(4, 3)})


def test_a_conjugate_does_not_load_into_memory_of_another_leaf(tmp_path: Path) -> None:
    x = complex_numbers()
    ckpt.save({"x": x, "c": x.clone()}, tmp_path, 0)
    with refused(ckpt.LeafMismatch, "leaf x and c", "same memory", root=tmp_path):
        ckpt.load(tmp_path, {"x": x, "c": x.conj()})
    into = torch.zeros(6, dtype=torch.complex64)
    ckpt.load(tmp_path, {"c": into.conj()}, only="c")
    assert torch.equal(into.conj().resolve_conj(), x)


def test_a_shard_with_a_conjugate_as_local_array_is_loaded(tmp_path: Path) -> None:
    x = complex_numbers()
    ckpt.save({"x": ckpt.Shard(x.conj(), (6,), (0,))}, tmp_path, 0)
    assert seen(ckpt.load(tmp_path)["x"]) == seen(x.conj())
    into = torch.zeros_like(x)
    ckpt.load(tmp_path, {"x": ckpt.Shard(into.conj(), (6,), (0,))})
    assert torch.equal(into, x)


def without_storage(nbytes: int, view: Callable[[Any], Any] = lambda t: t) -> Any:
    x = torch.ones(10)
    found = view(x)
    x.untyped_storage().resize_(nbytes)
    return found


def functional(make: Callable[[Any], Any] = lambda t: t) -> Any:
    return make(torch._to_functional_tensor(torch.ones(3)))


def quantized() -> Any:
    return torch.ones(4, dtype=torch.uint8).view(torch.quint8)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no storage": (lambda: without_storage(0), "storage"),
    "no storage, a view": (lambda: without_storage(0, lambda t: t[3:]), "storage"),
    "no storage, a conjugate": (lambda: without_storage(0, lambda t: t.view(torch.complex64).conj()), "storage"),
    "no storage, expanded": (lambda: without_storage(0, lambda t: t[3:4].expand(5)), "storage"),
    "a part of its storage": (lambda: without_storage(16), "storage"),
    "functional": (functional, "functionalize"),
    "functional view": (lambda: functional(lambda t: t[1:]), "functionalize"),
    "quantized": (quantized, "scales"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "memory"),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "indices and values"),
    "zero tensor": (lambda: torch._efficientzerotensor(3), "storage"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_plain_memory_is_refused(tmp_path: Path, kind: str) -> None:
    make, word = REFUSED[kind]
    ckpt.save({"x": 1}, tmp_path, 0)
    for state in ({"m": {"w": make()}}, {"m": {"w": ckpt.PerRank(make())}}):
        with refused(ckpt.UnsupportedLeaf, "leaf m.w", word, root=tmp_path):
            ckpt.save(state, tmp_path, 1)
    assert ckpt.open(tmp_path).steps() == [0]


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
def test_a_tensor_inside_a_transform_is_refused(tmp_path: Path, transform: str) -> None:
    ckpt.save({"x": 1}, tmp_path, 0)

    def saves(x: Any) -> Any:
        with refused(ckpt.UnsupportedLeaf, "leaf w", root=tmp_path):
            ckpt.save({"w": x}, tmp_path, 1)
        return x.sum()

    x = torch.ones(3, 2)
    if transform == "jvp":
        torch.func.jvp(saves, (x,), (x,))
    else:
        getattr(torch, transform, getattr(torch.func, transform))(saves)(x)


def test_shards_of_shared_memory_are_refused(tmp_path: Path) -> None:
    """Each rank may share the memory in another way."""
    x = numbers()
    whole = ckpt.Shard(x, (12,), (0,))
    with refused(ckpt.UnsupportedLeaf, "leaf a and leaf b", "share memory"):
        ckpt.save({"a": whole, "b": x[:5]}, tmp_path)
    with refused(ckpt.UnsupportedLeaf, "leaf a and leaf a", "share memory"):
        ckpt.save({"a": ckpt.Shard([x, x], (24,), [(0,), (12,)])}, tmp_path)
    ckpt.save({"a": whole, "b": ckpt.Shard(x, (12,), (0,)), "c": ckpt.Shard(numbers(5), (5,), (0,))}, tmp_path)
