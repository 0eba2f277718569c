"""Prints the import graph of the packages, its depth, and what is too large. `make map` runs it.

    python .ci/map.py          prints the map
    python .ci/map.py --docs   writes docs/design/files.md, and the table of layers in docs/design/architecture.md

A part is a folder, or a file at the top of ckpt/, with a list of the parts that it may import. An edge is an import at the top
of a file or inside a function. Imports for type checkers only do not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from parts import FOLDERS, ROOT, first_line, imports, layers, modules, part_of

FILE_LINES, FUNCTION_LINES, ARGUMENTS = 400, 60, 8
PAGE = ROOT / "docs" / "design" / "files.md"
ARCHITECTURE = ROOT / "docs" / "design" / "architecture.md"
_LAYERS, _END_OF_LAYERS = "<!-- layers -->\n", "<!-- end of layers -->\n"
"""The lines around the table of layers."""
_INTRODUCTION = """<!-- written by make map-docs -->
# Where everything lives

Every source file, by the part of the code to which it belongs. [Architecture](architecture.md) explains how they work together.
`make map-docs` writes this page, from `parts.toml` and the first line of each file. `make map` prints which part imports which.
"""


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of names that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
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
    """Return the number of names on the longest chain of imports; a cycle counts once."""
    group_of = {name: tuple(group) for group in cycles(edges) for name in group}
    above = {group_of.get(name, (name,)) for name in edges}

    @cache
    def below(group: tuple[str, ...]) -> int:
        others = {group_of.get(other, (other,)) for name in group for other in edges.get(name, ())} - {group}
        return 1 + max((below(other) for other in others), default=0)

    return max(map(below, above), default=0)


def part_edges(layer: str | None = None) -> dict[str, set[str]]:
    """Return which part imports which, by part name: of one layer, or of all."""
    edges: dict[str, set[str]] = {}
    for module in modules():
        part = part_of(module)
        if layer is None or part.layer == layer:
            others = {part_of(target) for target in imports(module)} - {part}
            edges.setdefault(part.name, set()).update(r.name for r in others if layer is None or r.layer == layer)
    return edges


def functions(files: Mapping[str, Path]) -> list[tuple[str, int, int]]:
    """Return the name of each function, its lines without the docstring, and the number of its arguments without self.

    files: the files to read, each by the prefix of the names of its functions.
    """
    found = []
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([argument for argument in named if argument.arg not in ("self", "cls")])
                lines = _lines(node) - (0 if ast.get_docstring(node) is None else _lines(node.body[0]))
                found.append((f"{name}.{node.name}", lines, count))
    return found


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def print_map() -> None:
    """Print the map."""
    files = {
        name: {t for t in imports(name) if part_of(t).layer == "ckpt"} for name in modules() if part_of(name).layer == "ckpt"
    }
    inside, everywhere = part_edges("ckpt"), part_edges()
    print(f"files of ckpt/: {len(files)}, edges {sum(map(len, files.values()))}, depth {depth(files)}")
    print(f"parts of ckpt/: {len(inside)}, edges {sum(map(len, inside.values()))}, depth {depth(inside)}")
    print(f"all parts: {len(everywhere)}, edges {sum(map(len, everywhere.values()))}, cycles {cycles(everywhere) or 'none'}")
    for part, targets in everywhere.items():
        print(f"  {part:28} → {', '.join(sorted(targets)) or 'nothing'}")
    lines = {path: path.read_text().count("\n") for path in modules().values()}
    long = sorted((path for path, count in lines.items() if count > FILE_LINES), key=lambda path: -lines[path])
    print(f"files over {FILE_LINES} lines: {len(long)}")
    for path in long:
        print(f"  {lines[path]:5} {path.relative_to(ROOT)}")
    found = functions(modules())
    large = sorted(((count, name) for name, count, _ in found if count > FUNCTION_LINES), reverse=True)
    print(f"functions over {FUNCTION_LINES} lines: {len(large)}")
    for count, name in large:
        print(f"  {count:5} {name}")
    wide = sorted(((count, name) for name, _, count in found if count > ARGUMENTS), reverse=True)
    print(f"functions of more than {ARGUMENTS} arguments: {len(wide)}")
    for count, name in wide:
        print(f"  {count:5} {name}")


def page_of_files() -> str:
    """Return the content of docs/design/files.md: the parts and their files, the highest layer first."""
    lines = [_INTRODUCTION]
    for layer in reversed(layers()):
        lines += [f"## {layer.name}/: {layer.what}", ""]
        for part in layer.parts:
            direct = part.imports | part.files
            allowed = ", ".join(f"`{name.removeprefix('ckpt.')}`" for name in sorted(direct)) or "no other part of this folder"
            lines += [f"**`{part.name}`** may import: {allowed}.", ""]
            lines += ["| file | what it is |", "|---|---|"]
            for module, path in modules().items():
                if part_of(module).name == part.name and (path.name != "__init__.py" or first_line(path)):
                    lines.append(f"| `{path.relative_to(ROOT)}` | {first_line(path).replace('|', chr(92) + '|')} |")
            lines.append("")
    return "\n".join(lines)


def page_of_architecture() -> str:
    """Return the content of docs/design/architecture.md with the table of layers, the highest first."""
    before, _, rest = ARCHITECTURE.read_text().partition(_LAYERS)
    rows = [f"| `{layer.name}/` | `{FOLDERS[layer.name]}` | {layer.what} |\n" for layer in reversed(layers())]
    table = "".join(["\n| folder | installed as | what it is |\n|---|---|---|\n", *rows, "\n"])
    return before + _LAYERS + table + _END_OF_LAYERS + rest.partition(_END_OF_LAYERS)[2]


if __name__ == "__main__":
    if sys.argv[1:] == ["--docs"]:
        PAGE.write_text(page_of_files())
        ARCHITECTURE.write_text(page_of_architecture())
    else:
        print_map()
