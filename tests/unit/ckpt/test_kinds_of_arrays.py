"""Each kind of numpy and jax array is loaded with the values it had, into new arrays and in place, or refused at the save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.refusal import refused
from numpy.lib.stride_tricks import as_strided, sliding_window_view

import ckpt

State = dict[str, Any]


def numbers(dtype: Any = "f4", n: int = 12) -> Any:
    return np.arange(1, n + 1).astype(dtype)


def big_endian() -> State:
    x = numbers(">f4")
    return {"x": x, "little": x.view("<f4"), "back": x[::-1], "second": x[1::2]}


def overlapping() -> State:
    x = numbers()
    return {"a": x, "b": x[:5], "c": x[7:2:-1], "rows": x.reshape(3, 4)[1:], "columns": x.reshape(3, 4)[:, 1:3]}


def repeated() -> State:
    x = numbers(n=5)
    return {"x": x, "windows": as_strided(x, (3, 3), (4, 4)), "zero": as_strided(x, (4,), (0,))}


def read_only() -> State:
    x = numbers()
    x.flags.writeable = False
    return {"x": x, "broadcast": np.broadcast_to(numbers(n=3), (4, 3)), "windows": sliding_window_view(x, 4)}


def of_immutable_bytes() -> State:
    return {"x": np.frombuffer(bytes(range(24)), "<u4")}


def fields() -> State:
    record = np.zeros(4, [("a", "i4"), ("b", ">f8"), ("c", "S3")])
    record["a"], record["b"], record["c"] = [1, 2, 3, 4], [0.5, 1.5, 2.5, 3.5], [b"p", b"qq", b"rrr", b""]
    return {"record": record, "a": record["a"], "b": record["b"], "c": record["c"]}


def classes_of_numpy() -> State:
    record = fields()["record"]
    plain: Any = numbers("i4").reshape(3, 4)
    return {
        "matrix": plain.view(np.matrix), "base": plain, "recarray": record.view(np.recarray),
        "text": np.array(["a", "bb"]).view(np.char.chararray), "elements": record.view(np.dtype((np.record, record.dtype))),
    }  # fmt: skip


def other_types() -> State:
    x = numbers("u2")
    return {
        "x": x, "bfloat16": x.view(ml_dtypes.bfloat16), "half": x.view("f2"), "int4": numbers(ml_dtypes.int4, 6),
        "date": np.array(["2024-01-01", "NaT"], "M8[s]"), "text": np.array(["a", "bé"]), "bool": np.array([True, False]),
        "complex": numbers("c8").conj(), "void": np.array([b"ab", b"c"], "V2"), "long": numbers("g"),
    }  # fmt: skip


def without_elements() -> State:
    x = numbers()
    return {
        "x": x, "none": x[:0], "empty": np.zeros((3, 0)), "no axes": np.array(5.0), "first": x[0],
        "view": x[3:4].reshape(()),
    }  # fmt: skip


def fortran() -> State:
    x = np.asfortranarray(numbers().reshape(3, 4))
    return {"x": x, "t": x.T, "moved": x[:, ::-2]}


def subclass() -> State:
    return {"x": numbers().view(Plain)}


class Plain(np.ndarray):
    """A class without data of its own."""


KEPT: dict[str, Callable[[], State]] = {
    f.__name__: f
    for f in (
        big_endian, overlapping, repeated, read_only, of_immutable_bytes, fields, classes_of_numpy, other_types,
        without_elements, fortran, subclass,
    )
}  # fmt: skip


def seen(value: Any) -> tuple[Any, ...]:
    """Return type, shape and bytes of an array, as its user sees them."""
    array = np.ascontiguousarray(value)
    return (array.dtype.str, np.dtype(array.dtype).type, np.shape(value), array.tobytes())


def all_seen(state: State) -> dict[str, tuple[Any, ...]]:
    return {name: seen(value) for name, value in state.items()}


def scramble(state: State) -> None:
    """Set all writable arrays of a state to zero."""
    for value in state.values():
        if isinstance(value, np.ndarray) and value.flags.writeable and value.size:
            value.view(np.ndarray)[...] = np.zeros((), value.dtype)


@pytest.mark.parametrize("kind", KEPT)
def test_an_array_is_loaded_with_its_type_shape_and_values(tmp_path: Path, kind: str) -> None:
    state = KEPT[kind]()
    expected = all_seen(state)
    classes = {name: type(value) for name, value in state.items() if type(value) is not Plain}
    ckpt.save(state, tmp_path, 0)
    new = ckpt.load(tmp_path)
    assert all_seen(new) == expected, "into new arrays"
    assert {name: type(new[name]) for name in classes} == classes
    for like in (state, KEPT[kind]()):
        arrays = {name: value for name, value in like.items() if isinstance(value, np.ndarray) and value.flags.writeable}
        scramble(like)
        ckpt.load(tmp_path, like)
        assert all_seen(like) == expected, "in place"
        assert all(like[name] is value for name, value in arrays.items())
        assert {name: type(like[name]) for name in classes} == classes


def test_a_read_only_array_is_replaced_by_a_read_only_one(tmp_path: Path) -> None:
    """Like a jax array it can't be filled: the state gets a new array, and other references keep the old one."""
    ckpt.save({"x": numbers(), "deep": [(numbers(),)]}, tmp_path, 0)
    x = np.zeros(12, "f4")
    x.flags.writeable = False
    like = {"x": x, "deep": [(x,)]}
    ckpt.load(tmp_path, like)
    assert (x == 0).all()
    assert not like["x"].flags.writeable
    assert seen(like["x"]) == seen(like["deep"][0][0]) == seen(numbers())
    with refused(ckpt.LeafMismatch, "leaf x", "filled in place", root=tmp_path):
        ckpt.load(tmp_path, {"x": ckpt.Shard(x, (12,), (0,))})


def test_views_that_share_memory_differently_than_saved_are_refused(tmp_path: Path) -> None:
    ckpt.save(big_endian(), tmp_path, 0)
    x = numbers(">f4")
    with refused(ckpt.LeafMismatch, "same memory", root=tmp_path):
        ckpt.load(tmp_path, {"x": x, "back": x[:]})
    with refused(ckpt.LeafMismatch, "same memory", root=tmp_path):
        ckpt.load(tmp_path, {"x": x, "second": x[::2]})
    ckpt.load(tmp_path, {"x": x, "second": x[1::2]})


def test_a_step_without_facts_about_views_is_refused_for_views(tmp_path: Path) -> None:
    """Steps of older versions have no facts about shared memory."""
    ckpt.save({"a": numbers(), "b": numbers()[:5].copy()}, tmp_path, 0)
    x = numbers()
    with refused(ckpt.LeafMismatch, "leaf a and b", "same memory", root=tmp_path):
        ckpt.load(tmp_path, {"a": x, "b": x[:5]})


def test_jax_arrays_are_loaded_and_deleted_ones_are_refused(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(8.0)
    z = jax.numpy.array([1 + 2j, 3 - 1j])
    state = {
        "x": x, "tied": x, "same": jax.numpy.array(x, copy=False), "half": x[:4], "c": z.conj(), "z": z,
        "host": np.asarray(x),
    }  # fmt: skip
    expected = {name: np.asarray(value).tobytes() for name, value in state.items()}
    ckpt.save(state, tmp_path, 0)
    for loaded in (ckpt.load(tmp_path), ckpt.load(tmp_path, dict(state))):
        assert {name: np.asarray(value).tobytes() for name, value in loaded.items()} == expected
        assert loaded["tied"] is loaded["x"]
    deleted = jax.numpy.arange(3.0)
    deleted.delete()
    with refused(ckpt.UnsupportedLeaf, "leaf m.w", root=tmp_path):
        ckpt.save({"m": {"w": deleted}}, tmp_path, 1)
