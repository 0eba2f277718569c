"""Prints the map of the code: which folder imports which, how deep, and what has grown too large. `make map` runs it.

An edge is an import that runs, at the top of a file or inside of a function, without those for type checkers only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "ckpt": "ckpt", "storage": "ckpt.storage", "aggregator": "ckpt.aggregator", "recovery": "ckpt.recovery",
    "tools": "ckpt.tools",
}  # fmt: skip
"""Folders of the repository and the packages that they are installed as."""

FILE_LINES, FUNCTION_LINES, ARGUMENTS = 400, 60, 8


@dataclass(frozen=True, slots=True)
class Module:
    """One file."""

    name: str
    path: Path
    lines: int
    imports: frozenset[str]
    """Modules of the project."""
    functions: tuple[tuple[str, int, int], ...] = field(default=())
    """Name, lines and arguments of each."""

    @property
    def folder(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules() -> dict[str, Module]:
    """All files of the packages, by the name under which they are imported."""
    names = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            names[".".join(part for part in parts if part != "__init__")] = path
    return {name: _module(name, path, names) for name, path in names.items()}


def _module(name: str, path: Path, names: Mapping[str, Path]) -> Module:
    text = path.read_text()
    tree = ast.parse(text)
    found = {target for node in _running(tree) for target in _targets(node, names)} - {name}
    functions = tuple(
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1, _arguments(node))
        for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )  # fmt: skip
    return Module(name, path, text.count("\n"), frozenset(found), functions)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _running(child)


def _targets(node: ast.AST, names: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in names)
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in names or node.module in names:
                yield inner if inner in names else node.module


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of names that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges.get(name, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def depth(edges: Mapping[str, set[str]]) -> int:
    """The number of names on the longest chain of imports; a cycle counts once."""
    group_of = {name: tuple(group) for group in cycles(edges) for name in group}
    above = {group_of.get(name, (name,)) for name in edges}

    @cache
    def below(group: tuple[str, ...]) -> int:
        others = {group_of.get(other, (other,)) for name in group for other in edges.get(name, ())} - {group}
        return 1 + max((below(other) for other in others), default=0)

    return max(map(below, above), default=0)


def main() -> None:
    """Print the map."""
    found = modules()
    inside = {name: {t for t in m.imports if found[t].path.is_relative_to(ROOT / "ckpt")} for name, m in found.items()
              if m.path.is_relative_to(ROOT / "ckpt")}  # fmt: skip
    folders: dict[str, set[str]] = {}
    for module in found.values():
        folders.setdefault(module.folder, set()).update(found[target].folder for target in module.imports)
    for folder, targets in folders.items():
        targets.discard(folder)
    print(f"files of ckpt/: {len(inside)}, edges {sum(map(len, inside.values()))}, depth {depth(inside)}")
    print(f"folders: {len(folders)}, edges {sum(map(len, folders.values()))}, cycles {cycles(folders) or 'none'}")
    for folder, targets in sorted(folders.items()):
        print(f"  {folder:22} → {', '.join(sorted(targets)) or 'nothing'}")
    long = sorted((m for m in found.values() if m.lines > FILE_LINES), key=lambda m: -m.lines)
    print(f"files over {FILE_LINES} lines: {len(long)}")
    for module in long:
        print(f"  {module.lines:5} {module.path.relative_to(ROOT)}")
    functions = [(lines, count, f"{m.name}.{name}") for m in found.values() for name, lines, count in m.functions]
    large = sorted((f for f in functions if f[0] > FUNCTION_LINES), reverse=True)
    print(f"functions over {FUNCTION_LINES} lines: {len(large)}")
    for lines, _, name in large:
        print(f"  {lines:5} {name}")
    wide = sorted(((count, name) for _, count, name in functions if count > ARGUMENTS), reverse=True)
    print(f"functions of more than {ARGUMENTS} arguments: {len(wide)}")
    for count, name in wide:
        print(f"  {count:5} {name}")


if __name__ == "__main__":
    main()
