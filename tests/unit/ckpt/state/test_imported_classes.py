"""A load uses a class that a file names only if the process has it already: it runs no code and no import to find it."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.processes import finish, python

import ckpt
from ckpt.state.tree_rebuild import rebuild

PROGRAM = """
import sys
import concurrent.futures
sys.path.insert(0, sys.argv[2])
import lazy
import ckpt
print(sorted(vars(ckpt.load(sys.argv[1])["x"]).items()))
print("part_of_lazy" in sys.modules, "concurrent.futures.process" in sys.modules)
"""
LAZY = """
def __getattr__(name):
    import part_of_lazy
    return part_of_lazy.Part
"""


@dataclasses.dataclass
class Outer:
    a: int

    @dataclasses.dataclass
    class Inner:
        a: int

    class Pair(NamedTuple):
        a: int


class Derived(Outer):
    pass


def _loaded(name: str, kind: str = "dataclass", fields: tuple[str, ...] = ("a",)) -> Any:
    return rebuild({kind: [1], "fields": list(fields), "class": name}, None)()  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["lazy:Part", "lazy:Part.Inner", "concurrent.futures:ProcessPoolExecutor"])
def test_a_load_imports_no_module_for_a_class_of_a_file(tmp_path: Path, module: str) -> None:
    """The attributes of these modules are imported at their first use."""
    (tmp_path / "lazy.py").write_text(LAZY)
    (tmp_path / "part_of_lazy.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass Part:\n    a: int\n")
    named = dataclasses.make_dataclass("Named", ["a"])
    named.__module__, _, named.__qualname__ = module.partition(":")
    ckpt.save({"x": named(3)}, tmp_path / "run", 0)
    printed = finish(python(PROGRAM, tmp_path / "run", tmp_path))
    assert printed.splitlines() == ["[('a', 3)]", "False False"]


def test_a_module_that_is_loaded_at_its_first_use_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "postponed.py").write_text("raise SystemExit('it was loaded')\n")
    spec = importlib.util.spec_from_file_location("postponed", tmp_path / "postponed.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "postponed", module)
    loader.exec_module(module)
    assert _loaded("postponed:Part").a == 1


def _fail(*arguments: object) -> Any:
    raise SystemExit("code of a name ran")


def _hostile() -> types.ModuleType:
    """Return a module whose values and classes can't be used without running their code. pytest would run it in this module."""

    class Failing:
        __class__ = property(_fail)
        __getattr__ = __eq__ = _fail
        __hash__ = None  # type: ignore[assignment]

    class Descriptor:
        __get__ = _fail

    class Meta(type):
        __getattr__ = _fail
        __dataclass_fields__ = _fields = Inner = property(_fail)

    made: Any = types.ModuleType("hostile")
    made.value = Failing()
    made.OfMeta = Meta("OfMeta", (), {})
    made.TupleOfMeta = Meta("TupleOfMeta", (tuple,), {})
    made.OfDescriptors = type("OfDescriptors", (), {"Inner": Descriptor(), "__dataclass_fields__": Descriptor()})
    made.TupleOfDescriptors = type("TupleOfDescriptors", (tuple,), {"_fields": Descriptor()})
    made.TupleOfFailing = type("TupleOfFailing", (tuple,), {"_fields": Failing()})
    return made  # type: ignore[no-any-return]


NAMES = [
    "OfMeta", "OfMeta.Inner", "OfMeta.absent", "TupleOfMeta", "OfDescriptors", "OfDescriptors.Inner", "TupleOfDescriptors",
    "TupleOfFailing", "value", "value.Inner", "",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["dataclass", "namedtuple"])
@pytest.mark.parametrize("name", NAMES)
def test_no_code_runs_to_find_a_class(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hostile", _hostile())
    assert _loaded(f"hostile:{name}", kind).a == 1


@pytest.mark.parametrize("path", ["Inner", "Inner.a", "absent", ""])
def test_an_object_in_the_place_of_a_module_runs_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for placed in (None, 3, vars(_hostile())["value"], types.SimpleNamespace(Inner=Outer.Inner)):
        monkeypatch.setitem(sys.modules, "placed", placed)
        assert _loaded(f"placed:{path}").a == 1


def test_imported_classes_are_used() -> None:
    assert type(_loaded(f"{__name__}:Outer")) is Outer
    assert type(_loaded(f"{__name__}:Outer.Inner")) is type(_loaded(f"{__name__}:Derived.Inner")) is Outer.Inner
    assert type(_loaded(f"{__name__}:Outer.Pair", "namedtuple")) is Outer.Pair
    assert type(_loaded(f"{__name__}:Derived")) is Derived
    assert type(_loaded(f"{__name__}:Outer", fields=("b",))) is not Outer
