"""A test that replaces a name of a module finds it there, and the module uses it.

After a constant has moved to another module, an assignment to its old place changes nothing, and the test proves nothing.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


def imported_modules(tree: ast.Module) -> dict[str, str]:
    """Return the full names of the modules of ckpt that a program imports, by the name that it gives them."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name.startswith("ckpt")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpt"):
            for alias in node.names:
                if source_of(name := f"{node.module}.{alias.name}") is not None:
                    found[alias.asname or alias.name] = name
    return found


@cache
def source_of(module: str) -> Path | None:
    """Return the file of a module; None if this is not a module."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def patched_names(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield module, name and line of what a program replaces: `module.name = …`, `setattr(module, "name", …)`,
    `setattr("module.name", …)`."""
    modules = imported_modules(tree)
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in modules:
                yield modules[target.value.id], target.attr, node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr") and len(node.args) >= 2:
            module, name = node.args[:2]
            if isinstance(module, ast.Name) and module.id in modules and isinstance(name, ast.Constant):
                yield modules[module.id], str(name.value), node.lineno
            elif isinstance(module, ast.Constant) and str(module.value).startswith("ckpt."):
                of, _, attribute = str(module.value).rpartition(".")
                if source_of(of) is not None:
                    yield of, attribute, node.lineno


@cache
def used_names(path: Path) -> tuple[set[str], set[str]]:
    """Return the names that a module binds at its top level, and those that it reads or declares as global."""
    tree = ast.parse(path.read_text())
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return bound, read


def programs(path: Path) -> Iterator[tuple[ast.Module, int]]:
    """Yield the program of a file and those in its strings, each with the number of lines before it."""
    tree = ast.parse(path.read_text())
    yield tree, 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value and "\n" in node.value:
            try:
                yield ast.parse(node.value), node.lineno - 1
            except SyntaxError:  # text, or a part of a program
                continue


def unused_patches(path: Path) -> list[str]:
    """Return the replaced names of a file that have no effect."""
    wrong = []
    for tree, before in programs(path):
        for module, name, line in patched_names(tree):
            source = source_of(module)
            assert source is not None
            bound, read = used_names(source)
            if name not in bound or name not in read:
                wrong.append(f"{path.relative_to(ROOT)}:{before + line}: {module} does not use {name}")
    return wrong


def test_each_name_that_a_test_replaces_is_used_by_its_module() -> None:
    files = sorted(TESTS.rglob("*.py"))
    count = sum(len(list(patched_names(tree))) for path in files for tree, _ in programs(path))
    assert count > 50, "no replaced names were found"
    assert [message for path in files for message in unused_patches(path)] == []
