"""The dtype of an unpickled array equals that of numpy, and is another object."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.states import assert_same

import ckpt
from ckpt.state import dtype_names
from ckpt.state.leaves import numpy as numpy_leaves

TYPES = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32", "float64"]
TYPES += ["complex64", "complex128"]


@pytest.fixture(autouse=True)
def no_names_of_other_tests() -> Iterator[None]:
    """Forget the names, which are remembered by dtype: the first of equal dtypes decides."""
    dtype_names.dtype_name.cache_clear()
    yield
    dtype_names.dtype_name.cache_clear()


def _state() -> dict[str, Any]:
    arrays = {name: np.arange(6).astype(name) for name in TYPES}
    return {"arrays": arrays, "scalars": {name: array[1] for name, array in arrays.items()}}


def test_unpickled_arrays_have_the_names_of_numpy(tmp_path: Path) -> None:
    """Another process, whose arrays were not unpickled, could otherwise not load them with `like`."""
    ckpt.save(pickle.loads(pickle.dumps(_state())), tmp_path / "run", step=0)
    assert {first.dtype for _, first, *_ in ckpt.open(tmp_path / "run")[0].manifest().totals()} == {*TYPES}
    dtype_names.dtype_name.cache_clear()
    assert_same(ckpt.load(tmp_path / "run", like=_state()), _state())


def test_a_step_with_names_of_unpickled_dtypes_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier commits have written such steps."""
    with monkeypatch.context() as earlier:
        earlier.setattr(numpy_leaves, "dtype_name", lambda dtype: f'numpy:"{dtype.str}"')
        ckpt.save(_state(), tmp_path / "run", step=0)
    assert_same(ckpt.load(tmp_path / "run", like=_state()), _state())
    assert_same(ckpt.load(tmp_path / "run"), _state())
    assert {leaf.dtype for leaf in ckpt.open(tmp_path / "run")[0].leaves()} == {*TYPES}
