"""What is saved comes back: every kind of leaf, every type, every container, with `like` and without."""

import collections
import dataclasses
import json
import math
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ckpt
from ckpt.state import tree
from ckpt.storage.base.fd_io import DescriptorReader
from ckpt.storage.local.directory import LocalStore

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
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(raw, np.uint8).copy().view(dtype).reshape(shape)


def same(a, b):
    """Equal in kind, type, shape and every bit."""
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
            same(a[key], b[key])
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, (float, complex)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    else:
        assert a == b


@pytest.mark.parametrize("name", ML_TYPES)
def test_every_type_of_ml_dtypes(tmp_path, name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    array = np.arange(-8, 9).astype(np.float32).clip(0 if name.startswith("uint") else -8, 8).astype(dtype).reshape(17, 1)
    state = {"a": array, "scalar": array[3, 0], "empty": array[:0]}
    ckpt.save(state, tmp_path / "r")
    same(ckpt.load(tmp_path / "r"), state)
    like = {k: np.zeros_like(v) for k, v in state.items()}
    like["scalar"] = dtype.type(0)
    same(ckpt.load(tmp_path / "r", like), state)


@pytest.mark.parametrize("dtype", NUMPY_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (4, 3)], ids=str)
def test_every_type_of_numpy(tmp_path, dtype, shape):
    array = random_bytes(dtype, shape) if dtype not in ("?", "U7") else np.zeros(shape, dtype)
    ckpt.save([array], tmp_path / "r")
    (loaded,) = ckpt.load(tmp_path / "r")
    same(loaded, array)


@pytest.mark.parametrize("name", TORCH_TYPES)
@pytest.mark.parametrize("shape", [(), (0, 4), (7, 8)], ids=str)
def test_every_type_of_torch(tmp_path, name, shape):
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if name == "bool" else 256, (math.prod(shape) * size,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    ckpt.save({"t": tensor}, tmp_path / "r")
    same(ckpt.load(tmp_path / "r"), {"t": tensor})
    like = {"t": torch.zeros(raw.shape, dtype=torch.uint8).view(dtype).view(shape) if raw.numel() else tensor.clone()}
    place = like["t"].data_ptr()
    loaded = ckpt.load(tmp_path / "r", like)
    assert loaded is like
    assert like["t"].data_ptr() == place
    same(like, {"t": tensor})


def test_plain_values_and_containers(tmp_path):
    ordered = collections.OrderedDict(b=1, a=2)
    default = collections.defaultdict(list, {"k": [1]})
    state = {
        "none": None, "true": True, "int": 3, "big": 1 << 200, "negative": -(1 << 64), "edge": 1 << 53,
        "float": 0.1, "zero": -0.0, "inf": -math.inf, "nan": math.nan, "complex": complex(1, -0.0),
        "text": "π\n\x00\ud800", "bytes": b"\x00\xff", "long": bytes(range(256)) * 1000, "empty": {}, "list": [], "tuple": (),
        "nested": [(1, [2, {"x": (3,)}])], "point": Point(1, np.float32(2)), "set": {1, 2}, "frozen": frozenset("ab"),
        "ordered": ordered, "default": default, "counter": collections.Counter("aab"),
        0: "int key", "0": "text key", (1, "a"): "tuple key", None: "none key", 2.5: "float key", True: "bool key",
        "data": Progress(5, np.ones(3)), "sealed": Frozen(1, "x"), "a.b": 1, "a": {"b": 2},
        "a.c": np.zeros(1), "a2": {}, "dot": {"a.c": np.ones(1)},
    }  # fmt: skip
    ckpt.save(state, tmp_path / "r")
    loaded = ckpt.load(tmp_path / "r")
    same(loaded, state)
    assert loaded["default"].default_factory is list
    assert type(loaded["counter"]) is collections.Counter


@given(st.integers(-20_000, 20_000).map(lambda bits: (1 << abs(bits)) * (1 if bits > 0 else -1)), st.integers(-1, 1))
@settings(max_examples=30, deadline=None)
def test_integers_of_any_length(power, more):
    """Also those that Python refuses to convert to decimal."""
    value = power + more
    flat = tree.flatten({"a": value})
    node = json.loads(tree.encode_tree(flat.node))["tree"]
    assert tree.rebuild(node, None)() == {"a": value}


class Configuration(dict):
    pass


class Layers(list):
    pass


def test_subclasses_of_containers(tmp_path):
    """They come back as what they are based on; what stands in `like` stays what it is."""
    state = {"c": Configuration(a=1), "l": Layers([1, np.ones(2)]), "t": torch.Size([1, 2])}
    ckpt.save(state, tmp_path / "r")
    same(ckpt.load(tmp_path / "r"), {"c": {"a": 1}, "l": [1, np.ones(2)], "t": (1, 2)})
    like = {"c": Configuration(a=0), "l": Layers([0, np.zeros(2)]), "t": torch.Size([0, 0])}
    loaded = ckpt.load(tmp_path / "r", like)
    same(loaded, state)
    assert loaded["c"] is like["c"]


@pytest.mark.parametrize("size", [0, 3, 100_000])
def test_bytes_and_bytearrays(tmp_path, size):
    state = {"b": bytes(size), "a": bytearray(b"\1" * size), "set": {b"x"}}
    ckpt.save(state, tmp_path / "r")
    loaded = ckpt.load(tmp_path / "r")
    same(loaded, state)
    loaded["a"] += b"more"
    assert ckpt.load(tmp_path / "r", {"a": bytearray(), "b": b""}, only=["a", "b"])["a"] == state["a"]
    same(ckpt.load(tmp_path / "r", {"b": b"", "a": bytearray(), "set": set()}), state)


@pytest.mark.parametrize("factory", [None, int, list, dict, tuple, collections.Counter, collections.OrderedDict], ids=str)
def test_defaultdicts(tmp_path, factory):
    state = {"d": collections.defaultdict(factory, {"a": 1})}
    ckpt.save(state, tmp_path / "r")
    loaded = ckpt.load(tmp_path / "r")
    same(loaded, state)
    assert loaded["d"].default_factory is factory


def test_long_integers(tmp_path):
    state = {"a": 10**5000, "b": [-(10**5000)], "c": 10**600}
    ckpt.save(state, tmp_path / "r")
    assert ckpt.load(tmp_path / "r") == state
    assert ckpt.load(tmp_path / "r", {"a": 0, "b": [0], "c": 0}) == state
    assert tree.rebuild({"int": "-36893488147419103232"}, None)() == -(1 << 65)  # as older steps have it
    assert tree.flatten(-(1 << 65)).node == {"int": "-36893488147419103232"}


def test_two_entries_of_one_name(tmp_path):
    state = {"a.b": np.zeros(3), "a": {"b": np.ones(3)}}
    ckpt.save(state, tmp_path / "r")
    same(ckpt.load(tmp_path / "r"), state)
    like = {"a.b": np.full(3, 7.0), "a": {"b": np.full(3, 7.0)}}
    same(ckpt.load(tmp_path / "r", like), state)


def test_classes_that_this_process_lacks(tmp_path, monkeypatch):
    ckpt.save({"p": Point(1, 2), "d": Progress(3, np.ones(2))}, tmp_path / "r")
    monkeypatch.delattr(__import__("sys").modules[__name__], "Point")
    monkeypatch.delattr(__import__("sys").modules[__name__], "Progress")
    loaded = ckpt.load(tmp_path / "r")
    assert loaded["p"] == (1, 2)
    assert type(loaded["p"]).__name__ == "Point"
    assert loaded["p"].y == 2
    assert loaded["d"].tokens == 3
    assert type(loaded["d"]).__name__ == "Progress"


def test_views_of_all_kinds(tmp_path):
    base = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)
    tensor = torch.arange(120.0).reshape(4, 5, 6)
    state = {
        "transposed": base.T, "strided": base[::2, :, 1::3], "reversed": base[::-1, :, ::-1],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(np.float32(3), (5, 5)), "t": tensor.t() if tensor.ndim == 2 else tensor.permute(2, 0, 1),
        "expanded": torch.ones(1, 3).expand(4, 3), "conj": torch.view_as_complex(torch.randn(4, 2)).conj(),
        "bf16": torch.randn(6, 4).bfloat16().t(),
    }  # fmt: skip
    ckpt.save(state, tmp_path / "r")
    loaded = ckpt.load(tmp_path / "r")
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(loaded[name], value)
        else:
            assert torch.equal(loaded[name], value.resolve_conj())
    like = {"strided": np.zeros((4, 5, 12), np.float32)[::2, :, ::6], "t": torch.zeros(4, 5, 6).permute(2, 0, 1)}
    ckpt.load(tmp_path / "r", like)
    np.testing.assert_array_equal(like["strided"], state["strided"])
    assert torch.equal(like["t"], state["t"])


@pytest.mark.parametrize("shape", [(3000, 1500), (2, 3, 1 << 20), (1, 1 << 22), ((1 << 21) + 3, 2), (5, 1000, 1000)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_large_arrays_of_many_blocks(tmp_path, shape, order):
    array = np.asarray(np.random.default_rng(1).random(shape, np.float32), order=order)
    ckpt.save({"x": array}, tmp_path / "r")
    checkpoint = ckpt.open(tmp_path / "r")[0]
    assert len(checkpoint.manifest().rows) > 1
    np.testing.assert_array_equal(ckpt.load(tmp_path / "r")["x"], array)
    like = {"x": np.zeros(shape, np.float32, order=order)}
    ckpt.load(tmp_path / "r", like)
    np.testing.assert_array_equal(like["x"], array)


def test_tied_jax_arrays_are_tied_again(tmp_path):
    import jax.numpy as jnp

    a = jnp.arange(5.0)
    ckpt.save({"a": a, "b": a}, tmp_path / "r", step=1)
    loaded = ckpt.load(tmp_path / "r")
    assert loaded["a"] is loaded["b"]
    zeros = jnp.zeros(5)
    filled = ckpt.load(tmp_path / "r", {"a": zeros, "b": zeros})
    assert filled["a"] is filled["b"]
    same(filled, {"a": a, "b": a})
    ckpt.save(filled, tmp_path / "r", step=2)
    assert list(ckpt.open(tmp_path / "r")[2]) == ["a"]
    untied = ckpt.load(tmp_path / "r", {"a": jnp.zeros(5), "b": jnp.ones(5)})
    assert untied["a"] is not untied["b"]
    same(untied, {"a": a, "b": a})


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    weight = torch.nn.Parameter(torch.randn(1000, 100))
    array = np.ones((50, 50))
    state = {"embed": weight, "head": weight, "view": weight.detach(), "n": [array, array], "other": array.copy()}
    checkpoint = ckpt.save(state, tmp_path / "r")
    assert checkpoint.commit.leaves == 3
    assert checkpoint.commit.raw_bytes == weight.nbytes + 2 * array.nbytes
    loaded = ckpt.load(tmp_path / "r")
    assert loaded["embed"] is loaded["head"]
    assert loaded["n"][0] is loaded["n"][1]
    assert loaded["other"] is not loaded["n"][0]
    assert isinstance(loaded["embed"], torch.nn.Parameter)
    untied = {"embed": torch.zeros(1000, 100), "head": torch.zeros(1000, 100)}
    ckpt.load(tmp_path / "r", untied)
    assert torch.equal(untied["head"], weight)
    assert torch.equal(untied["embed"], weight)


def test_module_optimizer_scheduler_and_generators(tmp_path):
    def make():
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": ckpt.RandomState(),
                "python": random.Random(3), "numpy": np.random.default_rng(4),
                "torch": torch.Generator().manual_seed(5)}  # fmt: skip

    def run(state, steps):
        losses = []
        for _ in range(steps):
            x = torch.randn(16, 6) + random.random() + np.random.rand() + state["python"].random() + state["numpy"].random()
            x = x + torch.rand(1, generator=state["torch"])
            loss = state["model"](x).square().mean()
            state["optimizer"].zero_grad()
            loss.backward()
            state["optimizer"].step()
            state["scheduler"].step()
            losses.append(loss.item().hex())
        return losses

    torch.manual_seed(0)
    state = make()
    run(state, 3)
    ckpt.save(state, tmp_path / "r")
    expected = run(state, 4)
    torch.manual_seed(99)
    fresh = make()
    parameters = [p.data_ptr() for p in fresh["model"].parameters()]
    loaded = ckpt.load(tmp_path / "r", fresh)
    assert loaded["model"] is fresh["model"]
    assert [p.data_ptr() for p in fresh["model"].parameters()] == parameters
    assert run(fresh, 4) == expected
    plain = ckpt.load(tmp_path / "r")  # without like: the state dicts
    assert plain["model"]._metadata == state["model"].state_dict()._metadata
    assert list(plain["optimizer"]) == ["state", "param_groups"]


def test_state_of_an_object_and_a_plain_dict_fit_each_other(tmp_path):
    model = torch.nn.Linear(3, 2)
    ckpt.save({"m": model}, tmp_path / "a")
    like = {"m": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}}
    ckpt.load(tmp_path / "a", like)
    assert torch.equal(like["m"]["weight"], model.weight)
    ckpt.save({"m": model.state_dict()}, tmp_path / "b")
    other = torch.nn.Linear(3, 2)
    ckpt.load(tmp_path / "b", {"m": other})
    assert torch.equal(other.weight, model.weight)


def test_jax(tmp_path):
    state = {
        "a": jnp.arange(12.0).reshape(3, 4), "key": jax.random.key(3), "old": jax.random.PRNGKey(1),
        "bf": jnp.ones(3, jnp.bfloat16),
        "i4": jnp.arange(5, dtype=jnp.int4), "zero": jnp.zeros((0, 3)), "scalar": jnp.float32(2),
    }  # fmt: skip
    ckpt.save(state, tmp_path / "r")
    same(ckpt.load(tmp_path / "r"), state)
    like = {k: v if k == "key" else jnp.zeros_like(v) for k, v in state.items()}
    like["key"] = jax.random.key(77)
    same(ckpt.load(tmp_path / "r", like), state)


def test_like_in_another_framework(tmp_path):
    ckpt.save({"w": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "r")
    like = {"w": np.zeros(6, np.float32), "b": np.zeros(3, ml_dtypes.bfloat16)}
    ckpt.load(tmp_path / "r", like)
    assert like["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert ckpt.load(tmp_path / "r", {"b": jnp.zeros(3, jnp.bfloat16)})["b"].tolist() == [1, 1, 1]


def test_scalars_are_updated_in_place(tmp_path):
    ckpt.save({"step": 7, "sub": {"lr": 0.5}, "l": [1, (2, 3)]}, tmp_path / "r")
    like = {"step": 0, "sub": {"lr": 0.0}, "l": [0, (0, 0)]}
    sub = like["sub"]
    assert ckpt.load(tmp_path / "r", like) is like
    assert like == {"step": 7, "sub": {"lr": 0.5}, "l": [1, (2, 3)]}
    assert like["sub"] is sub


def test_only_a_part(tmp_path):
    state = {"model": {"w": np.ones(3), "b": np.zeros(2)}, "opt": [np.ones(1), 5, {"x": 1}], "step": 3}
    ckpt.save(state, tmp_path / "r")
    same(ckpt.load(tmp_path / "r", only="model.*"), {"model": state["model"]})
    same(ckpt.load(tmp_path / "r", only="model"), {"model": state["model"]})
    same(
        ckpt.load(tmp_path / "r", only=["*.w", "opt.2.x"]),
        {"model": {"w": state["model"]["w"]}, "opt": [None, None, {"x": 1}]},
    )
    like = {"model": {"w": np.zeros(3), "b": np.full(2, 9.0)}, "opt": [np.zeros(1), 0, {"x": 0}], "step": 0}
    ckpt.load(tmp_path / "r", like, only=["*.w", "step"])
    same(like, {"model": {"w": np.ones(3), "b": np.full(2, 9.0)}, "opt": [np.zeros(1), 0, {"x": 0}], "step": 3})


def test_only_a_part_of_an_object(tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    before = other.bias.detach().clone()
    ckpt.save({"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}, tmp_path / "r")
    ckpt.load(tmp_path / "r", {"m": other}, only="m.weight")
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, before)


def test_a_root_that_is_no_dict(tmp_path):
    for i, state in enumerate([np.arange(5), [1, 2], 3.5, None, "x", (np.ones(2), 1), {}, torch.ones(3)]):
        ckpt.save(state, tmp_path / str(i))
        same(ckpt.load(tmp_path / str(i)), state)


def test_reading_a_slice_reads_only_those_bytes(tmp_path):
    array = np.random.default_rng(0).random((4096, 1024), np.float32)
    small = {f"s{i}": np.full((100, 100), i, np.float32) for i in range(50)}
    ckpt.save({"x": array, **small}, tmp_path / "r", codec="none")
    checkpoint = ckpt.open(tmp_path / "r")[0]
    read = []
    original = type(checkpoint.store.open(checkpoint.commit.packs[0].name)).read_into

    def counted(self, position, buffer):
        read.append(len(buffer))
        return original(self, position, buffer)

    reader = type(checkpoint.store.open(checkpoint.commit.packs[0].name))
    reader.read_into = counted
    try:
        np.testing.assert_array_equal(checkpoint["x"][1000:1008], array[1000:1008])
        assert sum(read) <= 2 * 256 << 10
        read.clear()
        np.testing.assert_array_equal(checkpoint["s7"][...], small["s7"])
        assert sum(read) <= 2 * 256 << 10
    finally:
        reader.read_into = original
    with pytest.raises(ckpt.LeafNotFound, match="close to it"):
        checkpoint["s7x"]


@pytest.mark.parametrize("only", [None, "b*"])
def test_the_store_is_told_of_each_block_before_it_is_read(tmp_path, monkeypatch, only):
    """And of nothing that is not read, nor of all at once."""
    ckpt.save({f"{x}{i}": np.full(5 << 20, i, np.float32) for x in "abc" for i in range(3)}, tmp_path, codec="none")
    monkeypatch.setattr("ckpt.block_io.block_reader.READ_THREADS", 1)
    told, read = {}, {}
    ahead = []
    prefetch, read_into = LocalStore.prefetch, DescriptorReader.read_into

    def telling(self, name, nbytes, start=0):
        told.update(dict.fromkeys(range(start, start + nbytes, 1 << 20)))
        prefetch(self, name, nbytes, start)

    def reading(self, position, buffer):
        if self._where.endswith(".pack"):
            assert position in told
            read[position] = len(buffer)
            ahead.append(max(told) - position)
        return read_into(self, position, buffer)

    monkeypatch.setattr(LocalStore, "prefetch", telling)
    monkeypatch.setattr(DescriptorReader, "read_into", reading)
    # of the beginning, while this reads names
    monkeypatch.setattr("ckpt.repository.checkpoint.Checkpoint.prefetch", lambda self: None)
    ckpt.load(tmp_path, only=only)
    assert sum(read.values()) == (180 << 20 if only is None else 60 << 20)
    assert told.keys() == read.keys()
    assert 16 << 20 <= max(ahead) <= 32 << 20


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slices_equal_those_of_numpy(tmp_path_factory, data):
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40))
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    path = tmp_path_factory.mktemp("r")
    ckpt.save({"x": array}, path / "r", codec=data.draw(st.sampled_from(["none", {"id": "zstd", "level": 1}])))
    lazy = ckpt.open(path / "r")[0]["x"]
    for _ in range(5):
        index = data.draw(hnp.basic_indices(shape, allow_newaxis=False))
        np.testing.assert_array_equal(lazy[index], array[index])
    np.testing.assert_array_equal(np.asarray(lazy), array)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20), st.complex_numbers(),
    hnp.arrays(st.sampled_from([np.float32, np.int8, np.bool_, np.complex64]), hnp.array_shapes(min_side=0, max_side=5)),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.booleans()), children, max_size=4),
        st.tuples(children, children),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(state=trees)
def test_any_tree(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("t") / "r"
    ckpt.save(state, path)
    same(ckpt.load(path), state)
    same(ckpt.load(path, state), state)


def test_a_record_of_foreign_types_is_refused_rather_than_changed(tmp_path):
    array = np.zeros(3, [("a", ml_dtypes.bfloat16), ("b", "f4")])
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"leaf x: .* store each field as an array"):
        ckpt.save({"x": array}, tmp_path / "r")


def streamed_state():
    """Leaves that share blocks, that fill several chunks, that end between them; and how they are saved."""
    draw = random.Random(3)
    sizes = [draw.choice([1, 77, 3000, 40_000, 700_001]) for _ in range(60)] + [3 << 20, (1 << 19) + 5, 10_000_019]
    return {f"x{i:02}": random_bytes("u1", (n,), i) for i, n in enumerate(sizes)} | {
        "matrix": random_bytes("f4", (1500, 1000)),
        "even": np.zeros(3 << 20, np.uint8),  # compressed
    }


def test_what_is_read_once_goes_chunk_by_chunk_to_all_its_places(tmp_path, monkeypatch):
    state = streamed_state()
    ckpt.save(state, tmp_path, step=1)
    longest = []
    read_into = DescriptorReader.read_into

    def reading(self, position, buffer):
        if self._where.endswith(".pack"):
            longest.append(len(buffer))
        return read_into(self, position, buffer)

    monkeypatch.setattr(DescriptorReader, "read_into", reading)
    like = {name: np.full_like(leaf, 7) for name, leaf in state.items()}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.restore(like)
    for name, leaf in state.items():
        np.testing.assert_array_equal(like[name], leaf)
    assert len(longest) > 20
    assert max(longest) < 1 << 20

    # Rows of one, columns of the other: the first go chunk by chunk too, the second have no contiguous place.
    rows, columns = np.zeros((700, 1000), np.float32), np.zeros((1500, 300), np.float32)
    for part, offset in ((rows, (401, 0)), (columns, (0, 650))):
        with ckpt.Checkpointer(tmp_path) as ck:
            ck.restore({"matrix": ckpt.Shard(part, (1500, 1000), offset)})
    np.testing.assert_array_equal(rows, state["matrix"][401:1101])
    np.testing.assert_array_equal(columns, state["matrix"][:, 650:950])


@pytest.mark.parametrize("part", [False, True])
def test_a_flipped_byte_in_any_chunk_is_found(tmp_path, part):
    array = random_bytes("f4", (1500, 1000))
    ckpt.save({"matrix": array}, tmp_path, step=1, codec="none")
    (pack,) = tmp_path.glob("steps/1/pack/*.pack")
    good = pack.read_bytes()
    first, last = (401 * 4000, 1101 * 4000) if part else (0, array.nbytes)
    for position in [first, last - 1, *random.Random(5).sample(range(first, last), 12)]:
        pack.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        target = np.zeros_like(array[401:1101] if part else array)
        like = {"matrix": ckpt.Shard(target, array.shape, (401, 0)) if part else target}
        with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.IntegrityError, match="leaf matrix of .*does not match"):
            ck.restore(like)
