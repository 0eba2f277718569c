"""A saved state is restored: every kind of leaf, every type, every container, with `like` and without."""

import collections
import json
import math
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.rank_threads import all_well, on_ranks
from helpers.values import ML_TYPES, NUMPY_TYPES, TORCH_TYPES, Frozen, Point, Progress, assert_identical, random_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ckpt
from ckpt.state import tree, tree_rebuild


@pytest.mark.parametrize("name", ML_TYPES)
def test_every_type_of_ml_dtypes_is_restored(tmp_path, name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    array = np.arange(-8, 9).astype(np.float32).clip(0 if name.startswith("uint") else -8, 8).astype(dtype).reshape(17, 1)
    state = {"a": array, "scalar": array[3, 0], "empty": array[:0]}
    ckpt.save(state, tmp_path / "r")
    assert_identical(ckpt.load(tmp_path / "r"), state)
    like = {k: np.zeros_like(v) for k, v in state.items()}
    like["scalar"] = dtype.type(0)
    assert_identical(ckpt.load(tmp_path / "r", like), state)


@pytest.mark.parametrize("dtype", NUMPY_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (4, 3)], ids=str)
def test_every_type_of_numpy_is_restored(tmp_path, dtype, shape):
    array = random_bytes(dtype, shape) if dtype not in ("?", "U7") else np.zeros(shape, dtype)
    ckpt.save([array], tmp_path / "r")
    (loaded,) = ckpt.load(tmp_path / "r")
    assert_identical(loaded, array)


@pytest.mark.parametrize("name", TORCH_TYPES)
@pytest.mark.parametrize("shape", [(), (0, 4), (7, 8)], ids=str)
def test_every_type_of_torch_is_restored(tmp_path, name, shape):
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if name == "bool" else 256, (math.prod(shape) * size,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    ckpt.save({"t": tensor}, tmp_path / "r")
    assert_identical(ckpt.load(tmp_path / "r"), {"t": tensor})
    like = {"t": torch.zeros(raw.shape, dtype=torch.uint8).view(dtype).view(shape) if raw.numel() else tensor.clone()}
    address = like["t"].data_ptr()
    loaded = ckpt.load(tmp_path / "r", like)
    assert loaded is like
    assert like["t"].data_ptr() == address
    assert_identical(like, {"t": tensor})


def test_plain_values_and_containers_are_restored(tmp_path):
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
    assert_identical(loaded, state)
    assert loaded["default"].default_factory is list
    assert type(loaded["counter"]) is collections.Counter


@given(st.integers(-20_000, 20_000).map(lambda bits: (1 << abs(bits)) * (1 if bits > 0 else -1)), st.integers(-1, 1))
@settings(max_examples=30, deadline=None)
def test_integers_of_any_length_are_encoded(power, more):
    """This includes those that Python refuses to convert to decimal."""
    value = power + more
    flat = tree.flatten({"a": value})
    node = json.loads(tree.encode_tree(flat.node))["tree"]
    assert tree_rebuild.rebuild(node, None)() == {"a": value}


class Configuration(dict):
    pass


class Layers(list):
    pass


def test_subclasses_of_containers_are_restored_as_their_base_class(tmp_path):
    """They are restored as their base class; objects of `like` keep their class."""
    state = {"c": Configuration(a=1), "l": Layers([1, np.ones(2)]), "t": torch.Size([1, 2])}
    ckpt.save(state, tmp_path / "r")
    assert_identical(ckpt.load(tmp_path / "r"), {"c": {"a": 1}, "l": [1, np.ones(2)], "t": (1, 2)})
    like = {"c": Configuration(a=0), "l": Layers([0, np.zeros(2)]), "t": torch.Size([0, 0])}
    loaded = ckpt.load(tmp_path / "r", like)
    assert_identical(loaded, state)
    assert loaded["c"] is like["c"]


@pytest.mark.parametrize("size", [0, 3, 100_000])
def test_bytes_and_bytearrays_are_restored(tmp_path, size):
    state = {"b": bytes(size), "a": bytearray(b"\1" * size), "set": {b"x"}}
    ckpt.save(state, tmp_path / "r")
    loaded = ckpt.load(tmp_path / "r")
    assert_identical(loaded, state)
    loaded["a"] += b"more"
    assert ckpt.load(tmp_path / "r", {"a": bytearray(), "b": b""}, only=["a", "b"])["a"] == state["a"]
    assert_identical(ckpt.load(tmp_path / "r", {"b": b"", "a": bytearray(), "set": set()}), state)


@pytest.mark.parametrize("factory", [None, int, list, dict, tuple, collections.Counter, collections.OrderedDict], ids=str)
def test_default_factories_are_restored(tmp_path, factory):
    state = {"d": collections.defaultdict(factory, {"a": 1})}
    ckpt.save(state, tmp_path / "r")
    loaded = ckpt.load(tmp_path / "r")
    assert_identical(loaded, state)
    assert loaded["d"].default_factory is factory


def test_very_long_integers_are_restored(tmp_path):
    state = {"a": 10**5000, "b": [-(10**5000)], "c": 10**600}
    ckpt.save(state, tmp_path / "r")
    assert ckpt.load(tmp_path / "r") == state
    assert ckpt.load(tmp_path / "r", {"a": 0, "b": [0], "c": 0}) == state
    assert tree_rebuild.rebuild({"int": "-36893488147419103232"}, None)() == -(1 << 65)  # the encoding of older steps
    assert tree.flatten(-(1 << 65)).node == {"int": "-36893488147419103232"}


def test_two_entries_of_one_leaf_name_are_restored(tmp_path):
    state = {"a.b": np.zeros(3), "a": {"b": np.ones(3)}}
    ckpt.save(state, tmp_path / "r")
    assert_identical(ckpt.load(tmp_path / "r"), state)
    like = {"a.b": np.full(3, 7.0), "a": {"b": np.full(3, 7.0)}}
    assert_identical(ckpt.load(tmp_path / "r", like), state)


def test_classes_that_do_not_exist_are_restored_as_similar_ones(tmp_path, monkeypatch):
    ckpt.save({"p": Point(1, 2), "d": Progress(3, np.ones(2))}, tmp_path / "r")
    monkeypatch.delattr(__import__("sys").modules[__name__], "Point")
    monkeypatch.delattr(__import__("sys").modules[__name__], "Progress")
    loaded = ckpt.load(tmp_path / "r")
    assert loaded["p"] == (1, 2)
    assert type(loaded["p"]).__name__ == "Point"
    assert loaded["p"].y == 2
    assert loaded["d"].tokens == 3
    assert type(loaded["d"]).__name__ == "Progress"


def test_views_of_all_kinds_are_restored(tmp_path):
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


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3000, 1500), (2, 3, 1 << 20), (1, 1 << 22), ((1 << 21) + 3, 2), (5, 1000, 1000)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_large_arrays_of_many_blocks_are_restored(tmp_path, shape, order):
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
    assert_identical(filled, {"a": a, "b": a})
    ckpt.save(filled, tmp_path / "r", step=2)
    assert list(ckpt.open(tmp_path / "r")[2]) == ["a"]
    untied = ckpt.load(tmp_path / "r", {"a": jnp.zeros(5), "b": jnp.ones(5)})
    assert untied["a"] is not untied["b"]
    assert_identical(untied, {"a": a, "b": a})


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


@pytest.mark.slow
def test_training_continues_identically_from_a_restored_state(tmp_path):
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


def test_a_state_dict_and_its_object_load_into_each_other(tmp_path):
    model = torch.nn.Linear(3, 2)
    ckpt.save({"m": model}, tmp_path / "a")
    like = {"m": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}}
    ckpt.load(tmp_path / "a", like)
    assert torch.equal(like["m"]["weight"], model.weight)
    ckpt.save({"m": model.state_dict()}, tmp_path / "b")
    other = torch.nn.Linear(3, 2)
    ckpt.load(tmp_path / "b", {"m": other})
    assert torch.equal(other.weight, model.weight)


def test_jax_arrays_and_keys_are_restored(tmp_path):
    state = {
        "a": jnp.arange(12.0).reshape(3, 4), "key": jax.random.key(3), "old": jax.random.PRNGKey(1),
        "bf": jnp.ones(3, jnp.bfloat16),
        "i4": jnp.arange(5, dtype=jnp.int4), "zero": jnp.zeros((0, 3)), "scalar": jnp.float32(2),
    }  # fmt: skip
    ckpt.save(state, tmp_path / "r")
    assert_identical(ckpt.load(tmp_path / "r"), state)
    like = {k: v if k == "key" else jnp.zeros_like(v) for k, v in state.items()}
    like["key"] = jax.random.key(77)
    assert_identical(ckpt.load(tmp_path / "r", like), state)


def test_a_leaf_loads_into_an_array_of_another_framework(tmp_path):
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


def test_a_counter_and_a_default_dict_get_the_saved_keys_that_like_lacks(tmp_path):
    state = {"seen": collections.Counter("aab"), "losses": collections.defaultdict(list, {"a": [1.5], "b": [np.ones(2)]})}
    ckpt.save(state, tmp_path / "r")
    like = {"seen": collections.Counter(), "losses": collections.defaultdict(list, {"a": [0.0]})}
    seen = like["seen"]
    assert_identical(ckpt.load(tmp_path / "r", like), state)
    assert like["seen"] is seen
    like = {"seen": collections.Counter(), "losses": collections.defaultdict(list)}
    ckpt.load(tmp_path / "r", like, only=["seen.b", "losses.a"])
    assert like == {"seen": {"b": 1}, "losses": {"a": [1.5]}}


@pytest.mark.parametrize(
    "value", [np.bytes_(b"\0a\0\0"), np.str_("\0é\0"), np.str_("\ufeff\U0001f600\0"), np.bytes_(b""), np.str_("")]
)
def test_text_of_numpy_that_ends_with_nul_is_restored(tmp_path, value):
    state = {"x": value, "list": [value], "array": np.array([value, value])}
    ckpt.save(state, tmp_path / "r")
    for loaded in (ckpt.load(tmp_path / "r"), ckpt.load(tmp_path / "r", state)):
        assert_identical(loaded, state)
        assert str(loaded["x"]) == str(value)
        assert len(loaded["list"][0]) == len(value)
    all_well(
        on_ranks(2, lambda g: ckpt.save({"x": value, value if type(value) is np.str_ else "y": 1}, tmp_path / "g", group=g))
    )
    assert str(ckpt.load(tmp_path / "g")["x"]) == str(value)


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


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(state=trees)
def test_any_tree_is_restored(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("t") / "r"
    ckpt.save(state, path)
    assert_identical(ckpt.load(path), state)
    assert_identical(ckpt.load(path, state), state)


def test_a_record_of_foreign_types_is_refused_rather_than_changed(tmp_path):
    array = np.zeros(3, [("a", ml_dtypes.bfloat16), ("b", "f4")])
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"leaf x: .* store each field as an array"):
        ckpt.save({"x": array}, tmp_path / "r")
