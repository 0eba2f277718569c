"""The parts of the code: which folder may import which. `make map` and the tests use it.

A part is a folder, or a file at the top of ckpt/. The table of parts is docs/design/parts.toml.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "design" / "parts.toml"


def _folders() -> dict[str, str]:
    """Return the package of each folder, as setup.py installs it, in the order of the layers of the table."""
    assignments = [node for node in ast.parse((ROOT / "setup.py").read_text()).body if isinstance(node, ast.Assign)]
    packages = next(ast.literal_eval(node.value) for node in assignments if ast.unparse(node.targets[0]) == "FOLDERS")
    package_of = {folder: package for package, folder in packages.items()}
    names = [layer["name"] for layer in tomllib.loads(TABLE.read_text())["layer"]]
    if {*names} != package_of.keys():
        raise ValueError(f"parts.toml and FOLDERS of setup.py differ: {', '.join(sorted({*names} ^ package_of.keys()))}")
    return {name: package_of[name] for name in names}


FOLDERS = _folders()
"""The folders of the repository and the packages as which they are installed, the lowest layer first."""


@dataclass(frozen=True, slots=True)
class Part:
    """A folder, or a file at the top of ckpt/, and what it may import of its own layer."""

    name: str
    layer: str
    imports: frozenset[str]
    """The parts of the same layer that it may import, including what those may import."""
    files: frozenset[str] = frozenset()
    """Single modules of other parts that it may import, too."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A top folder of the repository."""

    name: str
    what: str
    parts: tuple[Part, ...]


@cache
def layers() -> tuple[Layer, ...]:
    """Return the layers of the table, the lowest first."""
    found = []
    for layer in tomllib.loads(TABLE.read_text())["layer"]:
        direct = {part["name"]: part["imports"] for part in layer["parts"]}
        parts = tuple(
            Part(part["name"], layer["name"], frozenset(_closure(part["name"], direct)), frozenset(part.get("files", ())))
            for part in layer["parts"]
        )
        found.append(Layer(layer["name"], layer["what"], parts))
    return tuple(found)


def _closure(name: str, direct: Mapping[str, list[str]]) -> Iterator[str]:
    for other in direct[name]:
        yield other
        yield from _closure(other, direct)


@cache
def parts() -> dict[str, Part]:
    """Return all parts by name."""
    return {part.name: part for layer in layers() for part in layer.parts}


@cache
def modules() -> dict[str, Path]:
    """Return all files of the packages, by the name under which they are imported."""
    names = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            names[".".join(part for part in parts if part != "__init__")] = path
    return names


def part_of(module: str) -> Part:
    """Return the part of a module. Raises KeyError for a module that no part of the table contains."""
    by_name, name = parts(), module
    if module.count(".") == 1 and not modules()[module].name == "__init__.py" and module not in by_name:
        raise KeyError(f"{module} is not in {TABLE.relative_to(ROOT)}: add it as a part, or move it into one")
    while name not in by_name:
        above = name.rpartition(".")[0]
        if above == "ckpt":
            raise KeyError(f"{module} is not in {TABLE.relative_to(ROOT)}: add its folder as a part")
        name = above
    return by_name[name]


@cache
def imports(module: str, with_types: bool = False) -> frozenset[str]:
    """Return the modules of the project that a module imports, at its top or inside a function.

    with_types: include those that only type checkers import.
    """
    names = modules()
    tree = ast.parse(names[module].read_text())
    nodes = ast.walk(tree) if with_types else _running(tree)
    return frozenset(target for node in nodes for target in _targets(node, names)) - {module}


def forbidden(module: str, with_types: bool = True) -> list[str]:
    """Return the imports of a module that the table does not allow."""
    part, order = part_of(module), list(FOLDERS)
    wrong = []
    for target in imports(module, with_types):
        other = part_of(target)
        if other.layer != part.layer:
            allowed = order.index(other.layer) < order.index(part.layer)
        else:
            allowed = other.name in {part.name, "ckpt.version", "ckpt.errors", *part.imports} or target in part.files
        if not allowed:
            wrong.append(target)
    return sorted(wrong)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below, without those in `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _running(child)


def _targets(node: ast.AST, names: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in names)
    if isinstance(node, ast.ImportFrom):
        if node.level or node.module is None:
            raise ValueError(f"line {node.lineno} has a relative import: write the full name, such as ckpt.state")
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in names or node.module in names:
                yield inner if inner in names else node.module


def first_line(path: Path) -> str:
    """Return the first paragraph of the docstring of a file, in one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())
