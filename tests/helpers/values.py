"""Values of every type, and the comparison of values."""

import collections
import dataclasses

import jax
import ml_dtypes
import numpy as np
import torch

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Progress:
    tokens: int
    mean: np.ndarray
    done: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: str


ML_TYPES = [
    n
    for n in dir(ml_dtypes)
    if n.startswith(("bcomplex", "bfloat", "complex", "float", "int", "uint")) and isinstance(getattr(ml_dtypes, n), type)
]
NUMPY_TYPES = [
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "F", "D",
    ">f4", ">i8", "S5", "U7", "M8[ns]", "m8[s]", "V3", [("a", "<f4"), ("b", ">i2", (2, 3))],
]  # fmt: skip
TORCH_TYPES = [
    n for n in ("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "int8", "int16", "int32",
                "int64", "uint8", "uint16", "uint32", "uint64", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
                "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, n)
]  # fmt: skip


def random_bytes(dtype, shape, seed=0):
    """Return an array of this type and shape with random bytes."""
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(raw, np.uint8).copy().view(dtype).reshape(shape)


def assert_identical(a, b):
    """Check that two values are equal in kind, type, shape and every bit."""
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        x, y = a.detach().contiguous().view(-1), b.detach().contiguous().view(-1)
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    elif isinstance(a, jax.Array):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    elif isinstance(a, (np.ndarray, np.generic)):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_identical(a[key], b[key])
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_identical(x, y)
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_identical(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, (float, complex)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    else:
        assert a == b
