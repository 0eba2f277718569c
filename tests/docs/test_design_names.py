"""The source files, functions, classes, attributes and arguments that pages of the documentation name exist in the code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
CODE = ("ckpt", "storage", "aggregator", "recovery", "tools")

_FENCE = re.compile(r"^ *```.*?^ *```\n", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- written by make map-docs -->.*", re.DOTALL)
_BASE = re.compile(r"Paths without a folder in front are below `([\w/]+)/`")
_FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.py")
_PATH_ANYWHERE = re.compile(r"(?<![\w/.~<>-])(?:\.?[\w-]+/)+\w+\.py\b")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?")

_OTHER_LIBRARIES = frozenset(
    ["block_until_ready", "listings_expiry_time", "http_proxy", "DoAction", "DoGet", "DoPut", "MPI_THREAD_MULTIPLE"]
    + ["CUDA_VISIBLE_DEVICES", "AWS_", "GOOGLE_", "AZURE_"]
)
"""Names of pages that are not names of this project."""


@dataclass(frozen=True, slots=True)
class Definitions:
    """The names that source files define."""

    functions: frozenset[str] = frozenset()
    """Functions, methods, classes, and names that are assigned at the top of a module or class or as attributes of `self`."""
    members: dict[str, set[str]] = field(default_factory=dict)
    """By the name of a class: its methods and attributes."""
    arguments: dict[str, set[str]] = field(default_factory=dict)
    """By the name of a function or class: its arguments; of a class also its fields and those of `__init__`."""
    bases: dict[str, set[str]] = field(default_factory=dict)
    """By the name of a class: the names of its base classes."""


@cache
def definitions(files: tuple[Path, ...]) -> Definitions:
    """Return the names that these files define."""
    functions: set[str] = set()
    members: dict[str, set[str]] = {}
    arguments: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for file in files:
        tree = ast.parse(file.read_text())
        functions |= set(_targets(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.add(node.name)
                arguments.setdefault(node.name, set()).update(_arguments(node))
            elif isinstance(node, ast.ClassDef):
                own = set(_members(node))
                functions |= {node.name, *own}
                members.setdefault(node.name, set()).update(own)
                fields = {
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                }
                inits = (
                    each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__new__")
                )
                arguments.setdefault(node.name, set()).update(fields, *map(_arguments, inits))
                bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
    return Definitions(frozenset(functions), members, arguments, bases)


def _targets(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    return {each.arg for each in listed if each is not None}


def _members(node: ast.ClassDef) -> Iterator[str]:
    yield from _targets(node.body)
    for each in ast.walk(node):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield each.name
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr


@cache
def package() -> Definitions:
    """Return the names that the package defines."""
    return definitions(tuple(file for folder in CODE for file in sorted((ROOT / folder).rglob("*.py"))))


@cache
def words() -> frozenset[str]:
    """Return every identifier of the package, and every word of its string constants, without docstrings."""
    found: set[str] = set()
    for file in (file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                found.update(_IDENTIFIER.findall(node.value))
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, (ast.arg, ast.keyword)):
                found.add(node.arg or "")
            elif isinstance(node, ast.alias):
                found.update(node.name.split("."))
    return frozenset(found) | package().functions


# --- source files ----------------------------------------------------------------------------------------------------


def prose(page: str) -> str:
    """Return a page without its fenced blocks and its generated tables."""
    return _GENERATED.sub("", _FENCE.sub("", page))


def units(text: str) -> Iterator[str]:
    """Yield the paragraphs, list items and table rows of a text."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"\n(?=\||\s*(?:[-*]|\d+\.) )", paragraph)


def find_files(unit: str, base: str) -> tuple[list[Path], list[str]]:
    """Return the source files and the folders (`storage/*`) that a unit names in code style, and the names that are not files.

    A path is relative to the root of the repository or to `base`. A file name without a folder may follow a file of its folder.
    """
    found: list[Path] = []
    missing: list[str] = []
    for name in re.findall(r"`([^`\n]+)`", unit):
        if re.fullmatch(r"[\w/]+/\*", name):
            found += sorted((ROOT / name[:-2]).rglob("*.py"))
        if not _FILE.fullmatch(name):
            continue
        beside = [found[-1].parent] if found and "/" not in name else []
        candidates = [folder / name for folder in (ROOT, ROOT / base, *beside)]
        found += [file for file in candidates if file.is_file()][:1]
        if not any(file.is_file() for file in candidates):
            missing.append(name)
    return found, missing


def missing_files(page: str, are_bare_names_checked: bool) -> list[str]:
    """Return the source files that a page names and that do not exist.

    are_bare_names_checked: whether a name without a folder counts; in guides it may be a program of the reader, as `train.py`.
    """
    base, missing = "", []
    for unit in units(prose(page)):
        if stated := _BASE.search(unit):
            base = stated[1]
        missing += [name for name in find_files(unit, base)[1] if are_bare_names_checked or "/" in name]
    paths = {path for path in _PATH_ANYWHERE.findall(_GENERATED.sub("", page)) if path.partition("/")[0] in _top_folders()}
    return [*missing, *sorted(path for path in paths if not (ROOT / path).is_file())]


@cache
def _top_folders() -> frozenset[str]:
    return frozenset(entry.name for entry in ROOT.iterdir() if entry.is_dir())


# --- names -----------------------------------------------------------------------------------------------------------


def names_missing_in_files(page: str) -> list[str]:
    """Return names in the first cells of table rows that the files of the same cell, or of a row above, do not define."""
    missing: list[str] = []
    files: list[Path] = []
    before: list[Path] = []
    for unit in units(prose(page)):
        if not unit.startswith("|") or unit.startswith("|---"):
            files = before = []
            continue
        cell = unit.split("|")[1]
        before, files = files, find_files(cell, "")[0] or files
        if files:
            defined = definitions(tuple(dict.fromkeys([*files, *before]))).functions
            names = (name.removesuffix("()") for name in re.findall(r"`([^`]+)`", cell))
            missing += [f"{name} in {cell.strip()}" for name in names if _IDENTIFIER.fullmatch(name) and name not in defined]
    return missing


def unknown_names(page: str) -> list[str]:
    """Return the names in code style that the package does not have."""
    spans = (span for unit in units(prose(page)) for span in re.findall(r"`([^`\n]+)`", unit))
    return [span for span in spans if not is_known(span)]


def is_known(span: str) -> bool:
    """Return whether a span in code style is not a name, or is a name of another library, or a name that the package has."""
    found = _DOTTED.fullmatch(span)
    if found is None or span.endswith((".py", ".json", ".toml", ".md", ".sqlite", ".jsonl", ".sh")):
        return True
    name, call = found[1], found[2] or ""
    first, *rest = name.split(".")
    if first == "ckpt" and rest:
        return is_public(name) and _has_arguments(name.rpartition(".")[2], call)
    if first == "ck" and rest:
        return _has_member("Checkpointer", rest[0]) and _has_arguments(rest[-1], call)
    if rest and first in package().members:
        return _has_member(first, rest[0]) and _has_arguments(rest[-1], call)
    if rest:
        return not first[0].isupper()  # a name of another library, a verb of the wire, or a key
    if name in _OTHER_LIBRARIES:
        return True
    if call and name in package().arguments:
        return _has_arguments(name, call)
    if call or "_" in name.strip("_") or re.fullmatch(r"[A-Z][a-z]+[A-Z]\w*", name):
        return name in words()
    return True


def is_public(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of a module that can be imported."""
    module, attributes = name, []
    while True:
        try:
            if importlib.util.find_spec(module) is not None:
                break
        except ImportError:
            pass
        module, _, attribute = module.rpartition(".")
        attributes.insert(0, attribute)
    found: Any = importlib.import_module(module) if attributes else None
    for attribute in attributes:
        if not hasattr(found, attribute):
            return attribute in package().members.get(getattr(found, "__name__", ""), ())
        found = getattr(found, attribute)
    return True


def _has_member(owner: str, name: str) -> bool:
    if name in package().members.get(owner, ()):
        return True
    return any(_has_member(base, name) for base in package().bases.get(owner, ()))


def _has_arguments(name: str, call: str) -> bool:
    """Return whether a function or class of the package has the keyword arguments of a call, as in `(last=4, copies=2)`."""
    keywords = set(re.findall(r"[(,]\s*([a-z_]+)=", call))
    return name not in package().arguments or keywords <= package().arguments[name]


# --- the pages -------------------------------------------------------------------------------------------------------


def pages(*folders: str) -> list[str]:
    """Return the paths of all pages, or of those in these folders of docs/."""
    names = [str(page.relative_to(ROOT)) for page in PAGES]
    return [name for name in names if not folders or name.startswith(tuple(f"docs/{folder}/" for folder in folders))]


@pytest.mark.parametrize("page", pages())
def test_source_files_that_a_page_names_exist(page: str) -> None:
    assert missing_files((ROOT / page).read_text(), are_bare_names_checked=page.startswith("docs/design/")) == []


@pytest.mark.parametrize("page", pages("design", "reference"))
def test_names_beside_a_source_file_are_defined_in_it(page: str) -> None:
    assert names_missing_in_files((ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", pages("design", "reference"))
def test_names_in_code_style_exist_in_the_package(page: str) -> None:
    assert unknown_names((ROOT / page).read_text()) == []


# --- the checks themselves -------------------------------------------------------------------------------------------


def test_a_wrong_file_is_found() -> None:
    assert missing_files("See `ckpt/api.py` and ckpt/apis.py.", are_bare_names_checked=True) == ["ckpt/apis.py"]
    assert missing_files("See `saving/dedup.py`.", are_bare_names_checked=True) == ["saving/dedup.py"]
    below = "Paths without a folder in front are below `ckpt/`.\n\n`saving/dedup.py`, `pipeline.py`, `no_file.py`"
    assert missing_files(below, are_bare_names_checked=True) == ["no_file.py"]
    assert missing_files("Run `python train.py`, `train.py`.", are_bare_names_checked=False) == []


def test_a_wrong_name_beside_a_file_is_found() -> None:
    rows = "| where | what |\n|---|---|\n| `ckpt/repository/retention.py` `sweep` | |\n| `{}`, leftovers | |\n"
    assert names_missing_in_files(rows.format("sweep")) == []
    assert names_missing_in_files(rows.format("sweeep")) == ["sweeep in `sweeep`, leftovers"]
    assert names_missing_in_files(rows.format("drain_folder")) == ["drain_folder in `drain_folder`, leftovers"]


@pytest.mark.parametrize(
    "name",
    [
        "ckpt.save", "ckpt.Keep(last=4, copies=2)", "ckpt.adapters.torch", "Checkpointer.restore", "ck.step", "Store.fences",
        "Tier(\"memory\")", "sweep_temporaries", "ckpt.data.Loader", "torch.save", "registers.read", "keep", "CKPT_DIR",
    ],
)  # fmt: skip
def test_an_existing_name_is_known(name: str) -> None:
    assert is_known(name)


@pytest.mark.parametrize(
    "name",
    [
        "ckpt.sav", "ckpt.Keep(copy=2)", "ckpt.adapters.pytorch", "Checkpointer.restored", "ck.steps", "Store.fence_all",
        "Tier(lenght=3)", "sweep_temporary", "ckpt.data.Loaded", "no_function()", "CKPT_DIRS", "NoSuchClass",
    ],
)  # fmt: skip
def test_a_wrong_name_is_found(name: str) -> None:
    assert not is_known(name)
