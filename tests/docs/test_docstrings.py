"""Docstrings of the public API describe each argument and each error, and have an example."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = runpy.run_path(str(ROOT / ".ci/site/pages.py"))["API"]
ADAPTERS: list[str] = PAGES["adapters"][2]

_EXAMPLE = re.compile(r"\n\n {4,}\S")
_MADE_BY_ATTACH = "`attach` makes it"


@dataclass(frozen=True, slots=True)
class Documented:
    """A public class or function of an adapter."""

    module: str
    node: ast.ClassDef | ast.FunctionDef

    @property
    def text(self) -> str:
        """Its docstring, with that of the constructor."""
        init = self._init()
        return (ast.get_docstring(self.node) or "") + (ast.get_docstring(init) or "" if init is not None else "")

    def _init(self) -> ast.FunctionDef | None:
        inits = (node for node in self.node.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        return next(inits, None) if isinstance(self.node, ast.ClassDef) else None

    def arguments(self) -> list[str]:
        """Return the names of the arguments of the function or the constructor."""
        function = self.node if isinstance(self.node, ast.FunctionDef) else self._init()
        if function is None:
            return []
        listed = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        more = [each for each in (function.args.vararg, function.args.kwarg) if each is not None]
        return [each.arg for each in (*listed, *more) if each.arg not in ("self", "cls")]

    def functions(self) -> Iterator[ast.FunctionDef]:
        """Yield the function, or the public methods of the class."""
        if isinstance(self.node, ast.FunctionDef):
            yield self.node
        else:
            methods = (node for node in self.node.body if isinstance(node, ast.FunctionDef))
            yield from (method for method in methods if not method.name.startswith("_"))


def documented() -> Iterator[Documented]:
    for module in ADAPTERS:
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                yield Documented(module, node)


CASES = {f"{each.module}.{each.node.name}": each for each in documented()}


@pytest.mark.parametrize("name", CASES)
def test_each_argument_of_an_adapter_is_described(name: str) -> None:
    case = CASES[name]
    if case.module != "ckpt.adapters.testing" and _MADE_BY_ATTACH not in case.text:
        assert [argument for argument in case.arguments() if not re.search(rf"\b{argument}\b", case.text)] == []


@pytest.mark.parametrize("name", CASES)
def test_each_error_that_an_adapter_raises_is_described(name: str) -> None:
    case = CASES[name]
    attach = CASES.get(f"{case.module}.attach")
    common = case.text + (attach.text if attach is not None and _MADE_BY_ATTACH in case.text else "")
    for function in case.functions():
        text = common + (ast.get_docstring(function) or "")
        raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
        names = [ast.unparse(error.func) for error in raised]
        assert [name for name in names if name.rpartition(".")[2][0].isupper() and name not in text] == []


@pytest.mark.parametrize("module", ADAPTERS)
def test_each_adapter_has_an_example(module: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())) or ""
    assert _EXAMPLE.search(text) or any(_EXAMPLE.search(case.text) for case in CASES.values() if case.module == module)


@pytest.mark.parametrize(
    "name",
    [
        "ckpt.save", "ckpt.load", "ckpt.open", "ckpt.Checkpointer", "ckpt.Keep", "ckpt.Tier", "ckpt.Shard", "ckpt.PerRank",
        "ckpt.RandomState", "ckpt.data.Loader", "ckpt.data.Stream",
    ],
)  # fmt: skip
def test_the_main_functions_and_classes_have_an_example_and_describe_each_argument(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    text = inspect.getdoc(found) or ""
    if inspect.isclass(found):
        text += inspect.getdoc(found.__init__) or ""
    arguments = [argument for argument in inspect.signature(found).parameters if argument not in ("args", "kwargs")]
    assert [argument for argument in arguments if not re.search(rf"\b{argument}\b", text)] == []
    assert _EXAMPLE.search(text) or re.search(r"`[^`]*\w+\([^`]*`", text)


@pytest.mark.parametrize(
    "name",
    ["ckpt.save", "ckpt.load", "ckpt.open", "ckpt.Checkpointer.restore", "ckpt.Checkpointer.step", "ckpt.SaveHandle.result"],
)
def test_the_main_functions_describe_what_they_return_and_raise(name: str) -> None:
    text = inspect.getdoc(attribute_of_ckpt(name)) or ""
    assert re.search(r"\b[Rr]eturns?\b", text)
    assert len(re.findall(r"^    \w+: ", text.partition("\nRaises:\n")[2], re.MULTILINE)) >= 2


@pytest.mark.parametrize("name", ["ckpt.Keep", "ckpt.Tier", "ckpt.Shard", "ckpt.data.Loader", "ckpt.data.Stream"])
def test_the_main_classes_describe_what_they_raise(name: str) -> None:
    text = inspect.getdoc(attribute_of_ckpt(name)) or ""
    assert re.search(r"\bRaises?\b|\b(is|are) refused\b", text)


def attribute_of_ckpt(name: str) -> object:
    found: object = importlib.import_module("ckpt.data" if name.startswith("ckpt.data.") else "ckpt")
    for part in name.removeprefix("ckpt.").removeprefix("data.").split("."):
        found = getattr(found, part)
    return found


def test_each_public_function_and_class_has_a_docstring() -> None:
    """Those of modules. An overload has that of its function."""
    missing = [
        (str(path.relative_to(ROOT)), node.name)
        for folder in ("ckpt", "storage", "aggregator", "recovery", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
        if not ast.get_docstring(node) and "overload" not in map(ast.unparse, node.decorator_list)
    ]
    assert missing == []


# --- errors of the code below the adapters ---------------------------------------------------------------------------

ERRORS = {
    node.name: {ast.unparse(base) for base in node.bases}
    for file in ("storage/base/errors.py", "ckpt/errors.py")
    for node in ast.parse((ROOT / file).read_text()).body
    if isinstance(node, ast.ClassDef)
}
"""The classes of errors, each with its base classes."""

OF_A_CONTRACT = re.compile(r"\b(See|As in) `Store")
"""The errors of these methods are those of the abstract method."""


def with_bases(error: str) -> set[str]:
    return {error, "Exception", "BaseException"}.union(*(with_bases(base) for base in ERRORS.get(error, ())))


def raised(node: ast.AST) -> Iterator[str]:
    """Yield the errors that a piece of code constructs and raises, and does not catch itself."""
    if isinstance(node, ast.Try):
        caught = {name for handler in node.handlers for name in _names_of(handler)}
        yield from (error for part in node.body for error in raised(part) if not caught & with_bases(error))
        yield from (error for part in (*node.handlers, *node.orelse, *node.finalbody) for error in raised(part))
        return
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) in ERRORS:
        yield ast.unparse(node.exc.func)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):  # who calls an inner function may catch its errors
            yield from raised(child)


def _names_of(handler: ast.ExceptHandler) -> list[str]:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return ["BaseException" if each is None else ast.unparse(each) for each in types]


@pytest.mark.parametrize("folder", ["ckpt", "storage", "aggregator", "recovery"])
def test_a_public_function_names_the_errors_that_it_raises(folder: str) -> None:
    """Methods without a docstring have that of their base class. The tests above check adapters."""
    missing, names = [], 0
    for file in sorted((ROOT / folder).rglob("*.py")):
        module = ast.parse(file.read_text())
        scopes = [module, *(node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
        for function in (each for scope in scopes for each in scope.body if isinstance(each, ast.FunctionDef)):
            text = ast.get_docstring(function)
            if "adapters" in file.parts or function.name.startswith("_") or text is None or OF_A_CONTRACT.search(text):
                continue
            found = set(raised(function))
            names += len(found)
            missing += [f"{file.name}: {function.name} raises {error}" for error in sorted(found) if error not in text]
    assert names > 10
    assert missing == []
