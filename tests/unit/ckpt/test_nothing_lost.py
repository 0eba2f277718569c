"""Data that only a class of the user has is kept or refused by name; errors of a state's own code name the leaf."""

from __future__ import annotations

import collections
import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.messages import one_line
from helpers.refusal import refused

import ckpt
from ckpt.training.loss_monitor import as_number

# --- keys ------------------------------------------------------------------------------------------------------


class Side(str, Enum):  # noqa: UP042 - StrEnum has another text
    LEFT = "left"


class Number(IntEnum):
    ONE = 1


class Text(str):
    pass


class Whole(int):
    pass


@pytest.mark.parametrize("key", [Side.LEFT, Number.ONE, Text("a"), Whole(3), np.int64(3), np.float32(1)], ids=repr)
def test_a_key_of_a_subclass_or_numpy_type_is_refused(tmp_path: Path, key: Any) -> None:
    ckpt.save({"x": 1}, tmp_path, 0)
    for state in ({"m": {key: 1}}, {"m": {"other": 1, key: np.ones(3)}}, {"m": {(key, 2): 1}}):
        with refused(ckpt.UnsupportedLeaf, "leaf m", root=tmp_path):
            ckpt.save(state, tmp_path, 1)


_EXECUTED: dict[str, Any] = {}
exec("import enum\nclass Level(enum.IntEnum):\n    A = 3\nclass Word(str): pass\nclass Real(float): pass", _EXECUTED)
"""Classes without a module: they count as those of the module builtins."""


@pytest.mark.parametrize(
    "value",
    [Side.LEFT, Number.ONE, Text("a"), Whole(3), _EXECUTED["Level"].A, _EXECUTED["Word"]("a"), _EXECUTED["Real"](0.5)],
    ids=repr,
)
def test_a_value_of_a_subclass_is_refused(tmp_path: Path, value: Any) -> None:
    for state in ({"m": value}, {"m": [value]}, {"m": (value,)}, {"m": {value}}):
        with refused(ckpt.UnsupportedLeaf, "leaf m"):
            ckpt.save(state, tmp_path, 1)


def test_keys_are_restored_with_their_types(tmp_path: Path) -> None:
    keys = ["a", 1, 0.5, True, None, b"b", (1, "x", None), np.str_("text"), "1", "True", 1 << 70, -0.0, (True, 1.0)]
    state = {"m": [{key: number} for number, key in enumerate(keys)]}
    ckpt.save(state, tmp_path, 0)
    found = [next(iter(entry)) for entry in ckpt.load(tmp_path)["m"]]
    assert [(type(key), repr(key)) for key in found] == [(type(key), repr(key)) for key in keys]
    like = {"m": [{key: -1} for key in keys]}
    ckpt.load(tmp_path, like)
    assert like == state


# --- attributes --------------------------------------------------------------------------------------------------


class Bag(dict[str, Any]):
    """A dict that can have attributes."""


class Row(list[Any]):
    pass


class Pair(collections.namedtuple("Pair", "a b")):
    pass


class Triple(tuple[int, ...]):
    pass


class Ordered(collections.OrderedDict[str, Any]):
    pass


class Slotted(dict[str, Any]):
    __slots__ = ("extra",)


@dataclasses.dataclass
class Config:
    width: int = 1

    @functools.cached_property
    def double(self) -> int:
        return 2 * self.width


@dataclasses.dataclass
class Output(dict[str, Any]):
    """A dataclass that is a dict as well, as the outputs of transformers are."""

    loss: Any = None
    logits: Any = None


class Scaled(np.ndarray):
    scale: float


def with_extra(made: Any) -> Any:
    """Return the object after an attribute `extra` is set."""
    made.extra = np.ones(3)
    return made


def scaled() -> Any:
    """Return an array of a class with an attribute."""
    made = np.ones(3).view(Scaled)
    made.scale = 0.5
    return made


LOST: dict[str, tuple[Callable[[], Any], str]] = {
    "dict": (lambda: with_extra(Bag(a=1)), "extra"),
    "ordered dict": (lambda: with_extra(Ordered(a=1)), "extra"),
    "plain ordered dict": (lambda: with_extra(collections.OrderedDict(a=1)), "extra"),
    "dict with slots": (lambda: with_extra(Slotted(a=1)), "extra"),
    "list": (lambda: with_extra(Row([1])), "extra"),
    "namedtuple": (lambda: with_extra(Pair(1, 2)), "extra"),
    "tuple": (lambda: with_extra(Triple([1, 2])), "extra"),
    "dataclass": (lambda: with_extra(Config()), "extra"),
    "dataclass and dict": (lambda: Output(loss=3.0), "loss"),
    "array": (scaled, "scale"),
}


@pytest.mark.parametrize("kind", LOST)
def test_attributes_that_would_be_lost_are_refused(tmp_path: Path, kind: str) -> None:
    make, name = LOST[kind]
    ckpt.save({"x": 1}, tmp_path, 0)
    with refused(ckpt.UnsupportedLeaf, "leaf opt.0.c", f"the attribute {name} of its own", root=tmp_path):
        ckpt.save({"opt": [{"c": make()}]}, tmp_path, 1)


class SelfNamespace(dict[str, Any]):
    """A dict whose `__dict__` is the dict itself, as many configurations have it."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


def test_attributes_that_are_also_entries_are_not_refused(tmp_path: Path) -> None:
    both = Output(loss=np.ones(3))
    both["loss"] = both.loss
    config = Config(4)
    assert config.double == 8
    named = Bag(a=np.ones(2))
    named.a = named["a"]  # type: ignore[attr-defined]
    counts = collections.defaultdict(list, {"k": [1]})
    state = {"both": both, "config": config, "named": named, "home": SelfNamespace(b=3), "pair": Pair(1, 2), "counts": counts}
    ckpt.save(state, tmp_path, 0)
    loaded = ckpt.load(tmp_path)
    assert loaded["both"]["loss"].tolist() == [1, 1, 1]
    assert loaded["config"] == Config(4)
    assert loaded["home"] == {"b": 3}
    assert loaded["counts"].default_factory is list


def test_attributes_of_tensor_subclasses_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Quantized(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    class Weight(torch.nn.Parameter):  # type: ignore[misc,name-defined]
        pass

    for made in (torch.ones(3).as_subclass(Quantized), Weight(torch.ones(3))):
        ckpt.save({"w": made}, tmp_path / "plain", 0, overwrite=True)
        made.scales = torch.ones(1)
        made.block = 64
        with refused(ckpt.UnsupportedLeaf, "leaf m.w", "attributes block, scales of its own", "as_subclass(torch.Tensor)"):
            ckpt.save({"m": {"w": made}}, tmp_path / "lost", 0)
    marked = torch.nn.Parameter(torch.ones(3))
    marked.is_expert = True  # the program marks a plain parameter, and sets the mark again itself
    ckpt.save({"m": marked}, tmp_path / "marked", 0)
    ckpt.save({"b": torch.nn.ParameterList([marked])}, tmp_path / "marked", 1)


# --- code of the state that fails --------------------------------------------------------------------------------


class AttrDict(dict[str, Any]):
    __getattr__ = dict.__getitem__


class AttrOrdered(collections.OrderedDict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_a_dict_whose_entries_are_its_attributes_is_restored(tmp_path: Path) -> None:
    state = {"c": AttrDict(a=np.ones(3), deep=AttrDict(b=2)), "o": AttrOrdered(d=4)}
    ckpt.save(state, tmp_path, 0)
    assert ckpt.load(tmp_path)["c"]["deep"] == {"b": 2}
    state["c"]["a"][:] = 0
    ckpt.load(tmp_path, state)
    ckpt.load(tmp_path, state, rename=lambda name: name)
    assert state["c"].a.tolist() == [1, 1, 1]


class FailingProperty:
    @property
    def state_dict(self) -> Any:
        raise RuntimeError("not ready\nat all")

    def load_state_dict(self, state: Any) -> None:
        pass


class Failing:
    def state_dict(self) -> Any:
        raise KeyError("shard 3")

    def load_state_dict(self, state: Any) -> None:
        pass


@dataclasses.dataclass
class Unset:
    later: int = dataclasses.field(init=False)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (FailingProperty(), ("leaf opt.0", "FailingProperty", "RuntimeError: not ready")),
        (Failing(), ("leaf opt.0", "Failing", "KeyError: 'shard 3'")),
        (Unset(), ("leaf opt.0.later", "Unset", "set it before")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_the_state_names_the_leaf(tmp_path: Path, bad: Any, words: tuple[str, ...]) -> None:
    ckpt.save({"opt": [{"a": 1}]}, tmp_path, 0)
    with refused(ckpt.UnsupportedLeaf, *words, root=tmp_path):
        ckpt.save({"opt": [bad]}, tmp_path, 1)
    if not isinstance(bad, Unset):
        for options in ({}, {"rename": lambda name: name}):
            with refused(ckpt.UnsupportedLeaf, *words, root=tmp_path):
                ckpt.load(tmp_path, {"opt": [bad]}, **options)
    with ckpt.Checkpointer(tmp_path / "loop", every=1) as saver, refused(ckpt.UnsupportedLeaf, *words):
        saver.step(0, {"opt": [bad]})


# --- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [np.ones(3), {"total": 1.0}, [1.0], "high", 1j, np.zeros(0)], ids=repr)
def test_a_loss_that_is_no_number_is_refused(tmp_path: Path, loss: Any) -> None:
    with ckpt.Checkpointer(tmp_path, every=1) as saver, refused(ckpt.InvalidArgument, "loss=", "one element"):
        saver.step(0, {"x": 1}, loss=loss)


def test_a_loss_may_be_a_torch_or_jax_array_of_one_element() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    for module in (torch, jax.numpy):
        assert as_number(module.ones(1)) == as_number(module.ones((1, 1))) == 1
        with pytest.raises(ckpt.InvalidArgument) as raised:
            as_number(module.ones(3))
        one_line(raised, "loss=", "of shape [3]")


def test_the_warning_of_a_bad_loss_says_what_to_do_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ckpt.Checkpointer(tmp_path, every=1) as saver:
        saver.step(0, {"x": 1}, loss=float("nan"))
    assert "its loss is nan" in caplog.text
    assert "restore(state)" in caplog.text
    assert "save(step, state)" in caplog.text


# --- memory ------------------------------------------------------------------------------------------------------


SHORT_OF_MEMORY = """
import resource, sys
import numpy as np
import ckpt
from ckpt.block_io import staging_arena

state = {"w": np.ones(32 << 20), "small": np.ones(9)}
ckpt.save({"x": 1}, sys.argv[1], 0)
staging_arena.pool.clear()
pages = int(open("/proc/self/statm").read().split()[0])
limits = resource.getrlimit(resource.RLIMIT_AS)
for number, blocking in ((1, False), (2, True)):
    # Room for threads and small buffers, and for no arena of an asynchronous save (256 MiB) or a blocking one (32 MiB).
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 20), limits[1]))
    try:
        ckpt.save(state, sys.argv[1], number, blocking=blocking)
    except ckpt.StagingFailed as error:
        print(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
ckpt.save(state, sys.argv[1], 3)
print(ckpt.open(sys.argv[1]).steps())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of address space is that of Linux")
def test_a_save_without_memory_for_staging_fails_and_the_next_succeeds(tmp_path: Path) -> None:
    """The kernel provides no pages for the copy; the next save, with memory, is whole."""
    ran = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY, tmp_path / "r"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    *refusals, steps = ran.stdout.splitlines()
    assert steps == "[0, 3]"
    assert [line.split(" to ")[0] for line in refusals] == ["saving step 1", "saving step 2"]
    assert all("MiB for staging" in line and "memory=" in line for line in refusals)
