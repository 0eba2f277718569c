"""A leaf with a NaN causes one warning with its name, or the step is refused; with nan="allow", neither."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.messages import one_line
from helpers.refusal import refused
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.saving import nan_check

FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn"]


def array(dtype: str, n: int, at: int | None) -> Any:
    """Return n numbers with a NaN at `at`; masks of -inf are included, which are not a fault."""
    made = (np.arange(n) % 5 - 2).astype(getattr(ml_dtypes, dtype, dtype))
    if dtype not in ("float8_e4m3fn",):
        made[: n // 2 : 3] = -np.inf  # a mask, which is not a fault
    if at is not None:
        made[at] = np.nan
    return made


def state_with(bad: Any) -> dict[str, Any]:
    """Return a state with `bad`, integers whose bits would be a NaN, and other small leaves."""
    ids = np.full(100, -1, f"i{min(bad.itemsize, 8)}")
    return {"ids": ids, "a": [np.ones(7, bad.dtype), bad], "b": np.ones(9, bad.dtype), "n": 3}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "at"), [(1, 0), (50, 49), (100_000, 0), (100_000, 99_999)])
def test_a_nan_is_refused_with_its_leaf(tmp_path: Path, dtype: str, n: int, at: int) -> None:
    ckpt.save(state_with(array(dtype, n, None)), tmp_path, 0, nan="refuse")
    with refused(ckpt.NotFinite, "leaf a.1", "step 1", "nan='allow'"):
        ckpt.save(state_with(array(dtype, n, at)), tmp_path, 1, nan="refuse")
    assert ckpt.open(tmp_path).steps() == [0]
    ckpt.save(state_with(array(dtype, n, None)), tmp_path, 2, nan="refuse")


def test_a_run_with_nan_causes_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = {"model": {"bias": np.array([1, np.nan])}, "x": np.ones(3)}
    with ckpt.Checkpointer(tmp_path, every=1) as saver:
        for step in range(3):
            saver.step(step, bad)
            saver.wait()
    warned = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert len(warned) == 1
    assert "leaf model.bias" in warned[0]
    assert "step 0" in warned[0]
    assert "nan='refuse'" in warned[0]
    assert ckpt.open(tmp_path).steps() == [0, 1, 2]


@pytest.mark.parametrize("case", ["loss", "allow", "finite"])
def test_a_nan_causes_no_warning_where_it_is_expected(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    """It is expected where the loss was finite and where nan="allow" is set."""
    caplog.set_level(logging.WARNING)
    values = np.array([1.0, np.inf, 0.0 if case == "finite" else np.nan])
    with ckpt.Checkpointer(tmp_path, every=1, nan="allow" if case == "allow" else "warn") as saver:
        saver.step(0, {"x": values}, loss=2.0 if case == "loss" else None)
    assert "NaN" not in caplog.text


def test_a_step_with_nan_is_refused_even_if_the_loss_is_finite(tmp_path: Path) -> None:
    """The option asks for it. Earlier steps stay."""
    weights = np.ones(1 << 20, "f4")
    with ckpt.Checkpointer(tmp_path, every=1, nan="refuse") as saver:
        saver.step(0, {"w": weights}, loss=1.0)
        saver.wait()
        weights[:] = np.nan
        saver.step(1, {"w": weights}, loss=1.0)
        with pytest.raises(ckpt.SaveFailed) as raised:
            saver.wait()
        one_line(raised, "leaf w", "NaN", "step 1")
        weights[:] = 2
        saver.step(2, {"w": weights})
    assert ckpt.open(tmp_path).steps() == [0, 2]


def test_an_unknown_nan_option_is_refused(tmp_path: Path) -> None:
    with refused(ckpt.InvalidArgument, "nan='no'", "'refuse'"):
        ckpt.save({"x": 1}, tmp_path, 0, nan="no")  # type: ignore[call-overload]


SIZES = st.sampled_from([4, 8, 60, 64, 4096, 64 << 10, (64 << 10) + 4, 200 << 10])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["float32", "int32", "bfloat16"]), SIZES), max_size=20), st.data())
def test_every_nan_of_a_small_leaf_in_a_block_is_found(shape: list[tuple[str, int]], data: st.DataObject) -> None:
    leaves, end = [], 0
    for dtype, nbytes in shape:
        leaves.append((dtype, end, end + nbytes))
        end = -(-(end + nbytes) // 64) * 64
    block = np.zeros(end, np.uint8)
    for dtype, begin, last in leaves:
        if dtype == "int32":
            block[begin:last] = 0xFF
    checked = nan_check.checked_ranges(leaves)
    assert nan_check.first_nan(block, leaves, checked) is None
    small = [
        i for i, (dtype, begin, last) in enumerate(leaves) if dtype != "int32" and last - begin <= nan_check.FULL_CHECK_BYTES
    ]
    if small:
        number = data.draw(st.sampled_from(small))
        dtype, begin, last = leaves[number]
        size = 2 if dtype == "bfloat16" else 4
        at = begin + size * data.draw(st.integers(0, (last - begin) // size - 1))
        block[at : at + size] = 0xFF
        assert nan_check.first_nan(block, leaves, checked) == number
