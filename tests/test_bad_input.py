"""Wrong input: one line that says what, where and what to do, and nothing is changed."""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import random
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import assert_same, finish, one_line, python, snapshot, state_of

import ckpt
from ckpt import codec, records
from ckpt.digest import digest
from ckpt.storage.local import LocalStore


@contextmanager
def refused(kind: type[BaseException], *words: str, root: Path | None = None) -> Iterator[None]:
    """The body raises `kind` with a message of one line that has all `words`; the files below `root` stay as they were."""
    before = snapshot(root) if root else None
    with pytest.raises(kind) as told:
        yield
    one_line(told, *words)
    assert root is None or snapshot(root) == before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with step 3 and step 4."""
    for step in (3, 4):
        ckpt.save(state_of(step), tmp_path / "run", step)
    return tmp_path / "run"


# --- leaves that can't be stored -------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


class Slots:
    __slots__ = ("a",)


def masked() -> Any:
    return np.ma.masked_array([1, 2], [0, 1])


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
}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("kind", BAD_LEAVES)
def test_leaves_that_cannot_be_stored(root: Path, tmp_path: Path, kind: str, blocking: bool) -> None:
    bad = BAD_LEAVES[kind]()
    state = {"good": np.ones(3), "opt": [{"x": 1, "bad": bad}]}
    with refused(ckpt.UnsupportedLeaf, "leaf opt.0.bad", root=root):
        ckpt.save(state, root, 5, blocking=blocking)
    with refused(ckpt.UnsupportedLeaf, "leaf opt.0.bad"):
        ckpt.save(state, tmp_path / "new", blocking=blocking)
    assert not (tmp_path / "new").exists(), "a refused state has made a repository"
    if hasattr(bad, "close") and kind != "generator":
        bad.close()


@pytest.mark.parametrize(("shape", "start"), [((5, 0), 0), ((5,), -1), ((5,), 3), ((), 0)])
def test_a_flat_shard_outside_its_array(root: Path, shape: tuple[int, ...], start: int) -> None:
    with refused(ckpt.UnsupportedLeaf, "leaf w", "does not lie in an array", root=root):
        ckpt.save({"w": ckpt.Shard(np.ones(3), shape, flat=start)}, root)


def test_the_state_itself_cannot_be_stored(root: Path) -> None:
    with refused(ckpt.UnsupportedLeaf, "(root)", "function", root=root):
        ckpt.save(lambda: 1, root, 5)


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
def test_tensors_that_are_not_plain_memory(root: Path, make: Callable[[Any], Any], word: str) -> None:
    torch = pytest.importorskip("torch")
    bad = make(torch)
    with refused(ckpt.UnsupportedLeaf, "leaf m.w", word, root=root):
        ckpt.save({"m": {"w": bad}}, root, 5)
    with refused(ckpt.LeafMismatch, "leaf embed of `like` cannot be filled", word, root=root):
        ckpt.load(root, {"embed": bad})


def test_a_lazy_module(root: Path) -> None:
    torch = pytest.importorskip("torch")
    with refused(ckpt.UnsupportedLeaf, "leaf model.weight", "lazy module", "run", root=root):
        ckpt.save({"model": torch.nn.LazyLinear(3)}, root, 5)


def wrapped(torch: Any) -> Any:
    """A tensor that has no memory of its own."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            raise RuntimeError(f"{function} is not for me,\nnor is anything else")

    return Wrapper(torch.ones(3))


def fake(torch: Any) -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def masked_tensor(torch: Any) -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(torch.arange(3.0), torch.tensor([True, False, True]))


def test_a_traced_jax_value(root: Path) -> None:
    jax = pytest.importorskip("jax")
    with refused(ckpt.UnsupportedLeaf, "leaf w", "outside of jit", root=root):
        jax.jit(lambda x: ckpt.save({"w": x}, root, 5))(jax.numpy.ones(3))


def test_keys_that_cannot_be_stored(root: Path) -> None:
    for key in (object(), Colour.RED, frozenset([1]), np.float32(1)):
        with refused(ckpt.UnsupportedLeaf, "leaf m", "key", root=root):
            ckpt.save({"m": {key: 1}}, root, 5)
    for state in ({1 << 20_000: 1}, {(1, 1 << 20_000): 1}, {1 << 20_000, "a"}):
        with refused(ckpt.UnsupportedLeaf, "leaf m", "integer", root=root):
            ckpt.save({"m": state}, root, 5)
    with refused(ckpt.UnsupportedLeaf, "UTF-8", root=root):  # half of a pair: no such text can be written
        ckpt.save({"m\ud800": np.ones(3)}, root, 5)


def test_a_state_that_contains_itself(root: Path) -> None:
    for inner in ([], {}, collections.OrderedDict()):
        state: Any = {"a": {"b": inner}}
        if isinstance(inner, list):
            inner.append(state)
        else:
            inner["up"] = state
        with refused(ckpt.UnsupportedLeaf, "leaf a.b", "contains itself", root=root):
            ckpt.save(state, root, 5)


def test_a_state_that_is_nested_too_deeply(root: Path) -> None:
    state: Any = 1
    for _ in range(5000):
        state = [state]
    with refused(ckpt.UnsupportedLeaf, "nested too deeply", root=root):
        ckpt.save(state, root, 5)


# --- options of save -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"codec": "zstd"}, ckpt.FormatError, "numcodecs"),
        ({"codec": {"id": "nonsense"}}, ckpt.FormatError, "nonsense"),
        ({"codec": {"id": "pickle"}}, ckpt.FormatError, "pickle"),
        ({"codec": {"id": "quantize", "digits": 1, "dtype": "f4"}}, ckpt.FormatError, "quantize"),  # loses digits
        ({"codec": {"id": "blosc", "cname": "nonsense"}}, ckpt.FormatError, "not understood"),
        ({"codec": {"id": "zstd", "level": print}}, ckpt.FormatError, "not understood"),
        ({"codec": {"id": "zstd", "speed": 3}}, ckpt.FormatError, "not understood"),
        ({"codec": {"embed": 7}}, ckpt.FormatError, "7"),
        ({"codec": {"id": "bz2", "level": 99}}, ckpt.CkptError, "bz2"),
        ({"digest": "md5"}, ckpt.FormatError, "blake3"),
        ({"keep": 0}, ValueError, "at least the last step"),
        ({"keep": -1}, ValueError, "at least the last step"),
        ({"keep": "3"}, ckpt.InvalidArgument, "ckpt.Keep"),
        ({"keep": 2.5}, ckpt.InvalidArgument, "ckpt.Keep"),
        ({"memory": "1G"}, ckpt.InvalidArgument, "memory='1G'"),
        ({"memory": 0}, ckpt.InvalidArgument, "positive number of bytes"),
        ({"memory": 1e9}, ckpt.InvalidArgument, "positive number of bytes"),
        ({"timeout": "x"}, ckpt.InvalidArgument, "timeout='x'"),
        ({"timeout": None}, ckpt.InvalidArgument, "number of seconds"),
        ({"timeout": float("nan")}, ckpt.InvalidArgument, "number of seconds"),
        ({"timeout": 0}, ckpt.InvalidArgument, "number of seconds"),
    ],
    ids=str,
)
def test_options(root: Path, options: dict[str, Any], kind: type[BaseException], word: str) -> None:
    before = {n: d for n, d in snapshot(root).items() if not n.startswith("generations")}
    with refused(kind, word):
        ckpt.save(state_of(5), root, 5, **options)
    assert {n: d for n, d in snapshot(root).items() if not n.startswith("generations")} == before


@pytest.mark.parametrize("step", [-1, 1 << 62, 1.5, "7", None.__class__, np.array([1, 2])], ids=str)
def test_step_numbers(root: Path, step: Any) -> None:
    with refused(ckpt.CkptError, "step", root=root):
        ckpt.save(state_of(5), root, step)
    with refused(ckpt.CkptError, "step", root=root):
        ckpt.load(root, step=step)


def test_options_of_a_checkpointer(root: Path) -> None:
    for options in (
        {"every": 0}, {"every": -5}, {"every": "10m"}, {"every": 2.5}, {"every": True}, {"every": -timedelta(1)},
        {"in_flight": 0}, {"in_flight": "2"}, {"keep": "3"}, {"memory": "1G"}, {"timeout": "x"}, {"timeout": None},
        {"tiers": ["memory"]}, {"tiers": "memory"}, {"tiers": ckpt.Tier("memory")}, {"tiers": 3},
    ):  # fmt: skip
        with refused(ckpt.InvalidArgument, next(iter(options)), root=root):
            ckpt.Checkpointer(root, **options)
    for options in ({"codec": "zstd"}, {"digest": "md5"}):
        with refused(ckpt.FormatError, root=root):
            ckpt.Checkpointer(root, **options)
    ckpt.save(state_of(5), root, 5)  # none of them holds the repository


def test_numbers_of_numpy_are_numbers(root: Path) -> None:
    """As a configuration may have them; a number that is not seen as one would be taken for "auto"."""
    two = np.int64(2)
    tiers = [ckpt.Tier(root.parent / "near", every=two, limit=np.int64(1 << 30))]
    assert tiers[0].counts(1)
    assert not tiers[0].counts(2)
    with ckpt.Checkpointer(root, every=two, keep=two, memory=np.int64(1 << 20), in_flight=two, timeout=np.float32(5)) as saver:
        for step in range(10, 14):
            saver.step(step, state_of(step))
    assert ckpt.open(root).steps() == [11, 13]


@pytest.mark.parametrize("options", [{"limit": "1G"}, {"limit": 0}, {"every": "10m"}, {"every": 0}, {"keep": "3"}], ids=str)
def test_options_of_a_tier(options: dict[str, Any]) -> None:
    with refused(ckpt.InvalidArgument, next(iter(options))):
        ckpt.Tier("memory", **options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"only": 3}, "model.*"), ({"only": b"embed"}, "model.*"), ({"only": ["embed", 3]}, "model.*"),
        ({"rename": "x"}, "regular expression"), ({"rename": {"(": "x"}}, "unterminated"), ({"rename": {3: "x"}}, "regular"),
        ({"rename": {"x": r"\2"}}, "group reference"), ({"rename": {"x": None}}, "regular"),
        ({"progress": 3}, "function"), ({"share_reads": "never"}, "'auto', True or False"),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_load(root: Path, options: dict[str, Any], word: str) -> None:
    with refused(ckpt.InvalidArgument, next(iter(options)), word, root=root):
        ckpt.load(root, state_of(0), **options)
    if "only" not in options and "progress" not in options:
        with ckpt.Checkpointer(root, every=None) as saver, refused(ckpt.InvalidArgument, next(iter(options)), word):
            saver.restore(state_of(0), **options)


def test_patterns_may_come_from_an_iterator(root: Path) -> None:
    assert list(ckpt.load(root, only=iter(["embed", "step"]))) == list(ckpt.load(root, only=["embed", "step"]))


def test_a_closed_checkpointer(root: Path) -> None:
    saver = ckpt.Checkpointer(root)
    saver.close()
    saver.close()
    for call in (lambda: saver.save(1, {}), lambda: saver.step(1, {}), lambda: saver.restore({}), saver.wait):
        with refused(ckpt.CkptError, "closed"):
            call()


def test_a_step_that_is_there(root: Path) -> None:
    with refused(ckpt.AlreadyExists, "step 4", "overwrite=True"):
        ckpt.save(state_of(5), root, 4)
    assert_same(ckpt.load(root, step=4), state_of(4))
    ckpt.save(state_of(5), root, 4, overwrite=True)
    assert_same(ckpt.load(root, step=4), state_of(5))


# --- what is not there -----------------------------------------------------------------------------------------


def test_a_step_that_is_not_there(root: Path, tmp_path: Path) -> None:
    for call in (lambda: ckpt.load(root, step=7), lambda: ckpt.open(root)[7]):
        with refused(ckpt.StepNotFound, "no committed step 7", "3, 4", root=root):
            call()
    with ckpt.Checkpointer(tmp_path / "empty"):
        pass
    with refused(ckpt.StepNotFound, "no committed step"):
        ckpt.load(tmp_path / "empty")
    (root / "steps/9/pack").mkdir(parents=True)  # begun and never committed
    with refused(ckpt.StepNotFound, "no committed step 9"):
        ckpt.load(root, step=9)
    assert ckpt.open(root).steps() == [3, 4]


def test_an_unknown_leaf(root: Path) -> None:
    for only in ("embedd", "model.7", ["embed", "nothing.*"], "x*"):
        with refused(ckpt.LeafNotFound, only if isinstance(only, str) else "nothing.*", "step 4", root=root):
            ckpt.load(root, only=only)
    with refused(ckpt.LeafNotFound, "embedd", "embed", root=root):
        ckpt.open(root)[4]["embedd"]


@pytest.mark.parametrize("url", ["nonsense://host/run", "sqlite://x", "file://elsewhere/run", "://", "a b://c"])
def test_an_unknown_scheme(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: ckpt.load(url), lambda: ckpt.open(url), lambda: ckpt.save({"a": 1}, url)):
        with refused(ckpt.UnknownScheme, url, root=tmp_path):
            call()


def test_a_folder_that_is_no_repository(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for call in (lambda: ckpt.load(tmp_path), lambda: ckpt.open(tmp_path), lambda: ckpt.load(tmp_path, step=1)):
        with refused(ckpt.FormatError, "not a checkpoint repository", "check the path", root=tmp_path):
            call()
    for call in (lambda: ckpt.save({"a": 1}, tmp_path), lambda: ckpt.Checkpointer(tmp_path)):
        with refused(ckpt.FormatError, "notes.txt", "new folder", root=tmp_path):
            call()


def test_a_path_that_is_not_there_or_a_file(tmp_path: Path) -> None:
    with refused(ckpt.FormatError, "not a checkpoint repository", root=tmp_path):
        ckpt.load(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("mine")
    for call in (lambda: ckpt.load(tmp_path / "file"), lambda: ckpt.save({"a": 1}, tmp_path / "file")):
        with refused(ckpt.CkptError, str(tmp_path / "file"), root=tmp_path):
            call()


# --- like ------------------------------------------------------------------------------------------------------


def spoilt(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    like = state_of(0)
    change(like)
    return like


@dataclasses.dataclass
class Other:
    a: int = 1


LIKES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[ckpt.CkptError], tuple[str, ...]]] = {
    "shape": (lambda s: s.update(embed=np.zeros(7, np.uint8)), ckpt.LeafMismatch, ("embed", "shape [10000]", "[7]")),
    "axes": (lambda s: s["model"].__setitem__(0, np.zeros((5000, 1), "f4")), ckpt.LeafMismatch, ("model.0", "shape")),
    "dtype": (lambda s: s["model"].__setitem__(0, np.zeros(5000)), ckpt.LeafMismatch, ("model.0", "float32", "float64")),
    "kind": (lambda s: s.update(embed={"a": 1}), ckpt.LeafMismatch, ("embed", "array", "dict")),
    "number": (lambda s: s.update(embed=3), ckpt.LeafMismatch, ("embed", "array", "int")),
    "array": (lambda s: s.update(step=np.zeros(3)), ckpt.LeafMismatch, ("step", "int", "ndarray")),
    "missing": (lambda s: s["slow"].update(c=np.zeros(3)), ckpt.LeafNotFound, ("slow.c", "not in")),
    "missing number": (lambda s: s.update(extra=3), ckpt.LeafNotFound, ("extra", "not in")),
    "longer": (lambda s: s["model"].append(1), ckpt.LeafMismatch, ("model", "2 entries", "3")),
    "list": (lambda s: s.update(moments=list(s["moments"])), ckpt.LeafMismatch, ("moments", "tuple", "list")),
    "dataclass": (lambda s: s.update(slow=Other()), ckpt.LeafMismatch, ("slow", "dict", "Other")),
    "read-only": (lambda s: s["slow"]["b"].setflags(write=False), ckpt.LeafMismatch, ("slow.b", "read-only")),
    "masked": (lambda s: s["slow"].update(b=np.ma.zeros((3, 5), "i2")), ckpt.LeafMismatch, ("slow.b", "masked")),
}


@pytest.mark.parametrize("case", LIKES)
def test_like_that_differs(root: Path, case: str) -> None:
    """Found before a byte of `like` is written, wherever in it the difference is."""
    change, kind, words = LIKES[case]
    for like in (spoilt(change), {k: spoilt(change)[k] for k in reversed(spoilt(change))}):
        before = [(k, np.copy(v) if isinstance(v, np.ndarray) else v) for k, v in flat(like)]
        with refused(kind, *words, root=root):
            ckpt.load(root, like)
        after = flat(like)
        assert [k for k, _ in after] == [k for k, _ in before]
        for (key, now), (_, then) in zip(after, before, strict=True):
            assert np.array_equal(now, then) if isinstance(now, np.ndarray) else now == then, key
        with ckpt.Checkpointer(root) as saver, pytest.raises(kind):
            saver.restore(like)


def flat(state: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(state, dict):
        return [p for k, v in state.items() for p in flat(v, f"{path}.{k}")]
    if isinstance(state, (list, tuple)):
        return [p for i, v in enumerate(state) for p in flat(v, f"{path}.{i}")]
    return [(path, state)]


def test_a_module_that_refuses_its_state(root: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ckpt.save({"model": torch.nn.Linear(3, 4)}, tmp_path / "m", 0)
    model = torch.nn.Linear(3, 5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with refused(ckpt.LeafMismatch, "model.weight", "[4, 3]", "[5, 3]"):
        ckpt.load(tmp_path / "m", {"model": model})
    with refused(ckpt.CkptError, "model"):
        ckpt.load(tmp_path / "m", {"model": torch.nn.BatchNorm1d(3)})
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_module_of_other_entries_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def like(bias: bool, norm: bool = False) -> dict[str, Any]:
        layers = [torch.nn.Linear(2, 2, bias=bias), *([torch.nn.BatchNorm1d(2)] * norm)]
        return {"a": np.zeros(3), "model": torch.nn.Sequential(*layers), "z": np.zeros(3)}

    saved = {"a": np.ones(3), "model": torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)), "z": np.ones(3)}
    ckpt.save(saved, tmp_path, 0)
    ckpt.save(saved | {"model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))}, tmp_path, 1)
    for step, mine, words in (
        (0, like(bias=True), ["lacks 0.bias"]),
        (1, like(bias=False), ["has 0.bias, 1.bias, 1.weight besides"]),
        (0, like(bias=True, norm=True), ["lacks 0.bias"]),  # a norm loads in its own way, the layer before it does not
    ):
        before = mine["model"][0].weight.detach().clone()
        with refused(ckpt.LeafMismatch, "leaf model", "Sequential", "only=", *words):
            ckpt.load(tmp_path, mine, step=step)
        assert torch.equal(mine["model"][0].weight, before)
        assert not any(mine[key].any() for key in "az")
    mine = like(bias=True)
    ckpt.load(tmp_path, mine, step=0, only=["model.0.weight", "z"])
    assert torch.equal(mine["model"][0].weight, saved["model"][0].weight)
    assert (mine["a"].any(), mine["z"].all()) == (False, True)


def test_a_module_that_makes_up_for_what_was_not_saved(tmp_path: Path) -> None:
    """With hooks, or a load of its own, a module may take what it has no entries for."""
    torch = pytest.importorskip("torch")
    old = torch.nn.Linear(2, 2)
    ckpt.save({"model": {"w": old.weight.detach(), "bias": old.bias.detach()}}, tmp_path)

    def rename(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "w")

    class Own(torch.nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            rename(self, state, prefix)
            super()._load_from_state_dict(state, prefix, *rest)

    hooked = torch.nn.Linear(2, 2)
    hooked.register_load_state_dict_pre_hook(rename)
    for model in (hooked, Own(2, 2)):
        ckpt.load(tmp_path, {"model": model})
        assert torch.equal(model.weight, old.weight)
        assert torch.equal(model.bias, old.bias)


# --- the future, and forgeries ---------------------------------------------------------------------------------


def test_a_repository_of_the_future(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FORMAT_VERSION", 2)
    data = records.encode("repository", {"id": "x", "new": [1]})
    monkeypatch.undo()
    (root / "ckpt.json").write_bytes(data)
    for call in (
        lambda: ckpt.load(root), lambda: ckpt.load(root, step=4), lambda: ckpt.open(root),
        lambda: ckpt.save(state_of(5), root, 5), lambda: ckpt.Checkpointer(root),
    ):  # fmt: skip
        with refused(ckpt.FormatError, "format version 2", "up to 1", "install a newer", root=root):
            call()


def test_a_step_of_the_future(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not passed over in favour of an older step, as a damaged one is."""
    path = root / "steps/4/commit.json"
    body = json.loads(path.read_bytes())
    monkeypatch.setattr(records, "FORMAT_VERSION", 2)
    path.write_bytes(records.encode("commit", {k: v for k, v in body.items() if k not in ("digest", "kind", "format")}))
    monkeypatch.undo()
    for call in (lambda: ckpt.load(root), lambda: ckpt.load(root, step=4)):
        with refused(ckpt.FormatError, "steps/4/commit.json", "version 2", "install a newer", root=root):
            call()
    assert_same(ckpt.load(root, step=3), state_of(3))
    # And it is never deleted by software that does not understand it.
    ckpt.save(state_of(5), root, 5, keep=1)
    assert path.exists()


def forge(root: Path, step: int, change: Callable[[Any], Any], suffix: str) -> None:
    """Replace the manifest or the tree of a step by a changed one whose digests are right."""
    path = root / f"steps/{step}/commit.json"
    commit = records.decode_commit(path.read_bytes(), "")
    group = commit.manifests if suffix == ".parquet" else commit.trees
    (old,) = group
    data = change((root / old.name).read_bytes())
    (root / old.name).write_bytes(data)
    new = (records.FileRecord(old.name, len(data), digest("xxh3-128", data).hex()),)
    field = "manifests" if suffix == ".parquet" else "trees"
    path.write_bytes(records.encode_commit(dataclasses.replace(commit, **{field: new})))


def change_column(name: str, value: Any) -> Callable[[bytes], bytes]:
    """Set a column of the manifest to one value in all rows that have bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def change(data: bytes) -> bytes:
        table = pq.read_table(pa.BufferReader(data))
        at = table.schema.get_field_index(name)
        old = table.column(name).to_pylist()
        packs = table.column("pack").to_pylist()
        new = [value if pack is not None else was for was, pack in zip(old, packs, strict=True)]
        column = pa.array(new, table.schema.field(name).type.value_type).cast(table.schema.field(name).type) if (
            pa.types.is_dictionary(table.schema.field(name).type)
        ) else pa.array(new, table.schema.field(name).type)  # fmt: skip
        sink = io.BytesIO()
        pq.write_table(table.set_column(at, table.schema.field(name), column), sink)
        return sink.getvalue()

    return change


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("codec", '{"id": "pickle"}', ("pickle", "not used")),
        ("codec", '{"id": "json2"}', ("json2", "not used")),
        ("codec", "nonsense", ("not understood",)),
        ("pack", "../../../../etc/passwd", ("not a valid",)),
        ("pack", "/etc/passwd", ("not a valid",)),
        ("pack", "steps/4/pack/nothing.pack", ("missing",)),
        ("position", 1 << 40, ("early",)),
        ("dtype", "nonsense", ("nonsense",)),
        ("dtype", "object", ("object",)),
    ],
)
def test_a_forged_manifest(root: Path, column: str, value: Any, words: tuple[str, ...]) -> None:
    """Digests prove that nothing was changed by accident; whoever forges them as well still runs no code here."""
    ckpt.save({"w": np.zeros(50_000)}, root, 4, codec={"id": "zlib", "level": 1}, overwrite=True)
    forge(root, 4, change_column(column, value), ".parquet")
    with refused(ckpt.CkptError, *words, root=root):
        ckpt.load(root, step=4)
    with refused(ckpt.CkptError, *words, root=root):
        ckpt.load(root, {"w": np.zeros(50_000)}, step=4)


@pytest.mark.parametrize(
    "tree",
    [
        "not json", "[]", "{}", '{"tree": {"unknown": 1}}', '{"tree": {"array": "nothing", "kind": "numpy"}}',
        '{"tree": {"array": "embed", "kind": "nonsense"}}', '{"tree": ' + "[" * 5000,
    ],
)  # fmt: skip
def test_a_forged_tree(root: Path, tree: str) -> None:
    forge(root, 4, lambda _: tree.encode(), ".json")
    with refused(ckpt.CkptError, root=root):
        ckpt.load(root, step=4)
    with refused(ckpt.CkptError, root=root):
        ckpt.load(root, step=4, only="embed")
    with refused(ckpt.CkptError, root=root):
        ckpt.load(root, state_of(0), step=4)


def test_a_tree_that_names_code_runs_none(root: Path) -> None:
    """A class is used only if its fields are those saved; a function never is."""
    tree = {
        "dict": [
            ["a", {"namedtuple": ["exit 1"], "class": "os:system", "fields": ["command"]}],
            ["b", {"dataclass": ["x"], "class": "subprocess:Popen", "fields": ["args"]}],
            ["c", {"object": {"dict": []}, "class": "antigravity:anything"}],
        ]
    }
    forge(root, 4, lambda _: json.dumps({"tree": tree}).encode(), ".json")
    got = ckpt.load(root, step=4)
    assert got["a"].command == "exit 1"
    assert got["b"].args == "x"
    assert type(got["b"]).__module__ != "subprocess"
    assert "antigravity" not in sys.modules


def test_pickle_is_refused_by_name() -> None:
    with refused(ckpt.FormatError, "pickle"):
        codec.decode('{"id": "pickle"}', memoryview(b"cos\nsystem\n(S'false'\ntR."), np.empty(8, np.uint8))


def test_a_checkpoint_of_a_framework_that_is_not_here(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ckpt.save({"w": torch.arange(3.0)}, tmp_path / "run", 0)
    code = """
import sys
sys.modules["torch"] = None
import ckpt, numpy
like = {"w": numpy.zeros(3, "f4")}
print(ckpt.load(sys.argv[1], like)["w"].tolist())
try:
    ckpt.load(sys.argv[1])
except ckpt.CkptError as error:
    print(error)
"""
    filled, told = finish(python(code, tmp_path / "run")).splitlines()
    assert filled == "[0.0, 1.0, 2.0]"
    one_line(RuntimeError(told), "torch", "w", "like")


def test_names_that_would_leave_the_root(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    for name in ("../x", "/etc/passwd", "a/../../x", "a//b", ".hidden", "a/.tmp", "", "a\0b", "x" * 2000):
        for call in (store.get, store.open, store.create, lambda n: store.put(n, b""), lambda n: store.delete([n])):
            with refused(ckpt.InvalidName, "not a valid object name"):
                call(name)
    assert not (tmp_path / "run").exists()


def test_a_save_while_another_thread_imports_masked_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy.ma", types.ModuleType("numpy.ma"))  # as it is in the middle of it
    ckpt.save({"a": np.arange(3)}, tmp_path, step=0)
    monkeypatch.undo()
    assert ckpt.load(tmp_path)["a"].tolist() == [0, 1, 2]
