"""Arrays of jax on a CUDA device are saved, and loaded to the device that `like` names."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else jax takes most of the device's memory from other tests

import numpy as np
import pytest

import ckpt

jax = pytest.importorskip("jax")


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "float8_e4m3fn"])
def test_arrays_are_loaded_to_the_device(dtype: str, tmp_path: Path) -> None:
    if not _has_gpu():
        pytest.skip("jax has no CUDA device on this machine")
    x = (jax.random.normal(jax.random.key(0), (100, 300)) * 20).astype(dtype)
    ckpt.save({"x": x}, tmp_path / "r")
    found = ckpt.load(tmp_path / "r", {"x": jax.numpy.zeros_like(x)})["x"]
    assert found.devices() == x.devices() == {jax.devices("gpu")[0]}
    assert np.asarray(found).tobytes() == np.asarray(x).tobytes()


def test_donated_memory_is_copied_before_the_save_returns(tmp_path: Path) -> None:
    if not _has_gpu():
        pytest.skip("jax has no CUDA device on this machine")
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.numpy.zeros((1 << 20,))
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        for number in range(5):
            handle = ck.save(number, {"x": x})
            for _ in range(10):
                x = step(x)
            handle.result()
            assert (np.asarray(ckpt.load(tmp_path / "r", step=number)["x"]) == 10 * number).all()
