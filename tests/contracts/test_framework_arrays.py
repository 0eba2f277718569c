"""The arrays of numpy, torch and jax keep the contract of `ckpt.adapters.testing`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from ckpt.adapters.testing import ArrayContract

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

COMMON = (
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int16",
    "int32",
    "uint8",
    "bool",
    "complex64",
)


class TestNumpy(ArrayContract):
    dtypes = (*COMMON, "float64", "int64", "uint16", "uint64", "complex128")
    fills_in_place = True

    def array(self, values: npt.NDArray[Any]) -> Any:
        return values.copy()

    def values(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(array)


class TestTorch(ArrayContract):
    dtypes = (*COMMON, "float64", "int64", "complex128")
    fills_in_place = True

    def array(self, values: npt.NDArray[Any]) -> Any:
        if values.dtype.name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            return torch.tensor(values)
        integers = torch.tensor(values.view(np.dtype(f"i{values.itemsize}")))
        return integers.view(getattr(torch, values.dtype.name))

    def values(self, array: Any) -> npt.NDArray[Any]:
        name = str(array.dtype).removeprefix("torch.")
        if not hasattr(ml_dtypes, name):
            return np.asarray(array.numpy())
        integers = array.view(torch.int16 if array.itemsize == 2 else torch.int8)
        return np.asarray(integers.numpy().view(getattr(ml_dtypes, name)))


class TestJax(ArrayContract):
    dtypes = (*COMMON, "uint16")
    fills_in_place = False

    def array(self, values: npt.NDArray[Any]) -> Any:
        return jax.numpy.array(values)

    def values(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(array)
