"""A public name means one thing in the whole package, and a constant is defined in one place."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("ckpt", "storage", "aggregator", "recovery", "tools")

ONE_FOR_EACH_FRAMEWORK = frozenset(["Checkpoints", "CkptManager", "ModelState"])
"""Public classes of adapters that do the same for different frameworks."""

NAMED_BY_TORCH = frozenset(["Reader", "Writer"])
"""Of ckpt.adapters.dcp: the storage reader and writer of torch.distributed.checkpoint."""

WITHOUT_CKPT = frozenset(["ckpt/adapters/adapt/startup/hooks.py", "recovery/ranks/fork_server.py"])
"""Files that run before ckpt is imported, so that they repeat the names of environment variables."""


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each source file, by its path."""
    files = (file for folder in CODE for file in sorted((ROOT / folder).rglob("*.py")))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def repeated(found: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Return what is in several files, with the files."""
    files = defaultdict(list)
    for name, file in found:
        files[name].append(file)
    return {name: sorted(set(where)) for name, where in sorted(files.items()) if len(set(where)) > 1}


def classes() -> Iterator[tuple[str, str]]:
    """Yield the public classes and the public names of types, each with its file. Type variables are left out."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, file
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if re.match("[A-Z].*[a-z]", name) and not ast.unparse(node.value).startswith("TypeVar"):
                    yield name, file


def test_a_class_name_is_defined_once() -> None:
    assert repeated(classes()).keys() <= ONE_FOR_EACH_FRAMEWORK | NAMED_BY_TORCH


FILES_OF_A_KIND = frozenset(["base", "errors", "etcd", "metrics", "mpi", "sqlite", "store", "testing", "threads"])
"""Names of files that several folders have: the base class, the errors, or the implementation by one library."""


def test_a_file_name_is_used_once() -> None:
    """Except for those of frameworks, which each part that knows frameworks has, and for a few kinds."""
    files = ((Path(file).stem, file) for file in trees() if not file.endswith("__init__.py"))
    frameworks = {Path(file).stem for file in trees() if file.startswith(("ckpt/state/leaves/", "ckpt/adapters/"))}
    assert repeated(files).keys() - frameworks <= FILES_OF_A_KIND


# --- functions -------------------------------------------------------------------------------------------------------


def functions() -> Iterator[tuple[str, str]]:
    """Yield the public functions of modules, without commands and without those that a contract names.

    `ckpt.state.frameworks` lists the functions of each framework. An export has `write`, and an import has `read_state`.
    """
    for file, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name != "main":
                is_command = any("command" in ast.unparse(decorator) for decorator in node.decorator_list)
                in_contract = file.startswith(("ckpt/state/", "tools/export_", "tools/import_"))
                if not is_command and not (in_contract and node.name in _contract_names()):
                    yield node.name, file


@cache
def _contract_names() -> frozenset[str]:
    text = ast.get_docstring(trees()["ckpt/state/frameworks.py"]) or ""
    return frozenset(re.findall(r"(\w+)\([\w, ]*\)", text)) | {"write", "read_state"}


def imported_alone() -> Iterator[tuple[str, str]]:
    """Yield the functions that a file imports without their module, and the module."""
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if alias.asname in (None, alias.name):
                        yield alias.name, node.module


def test_of_functions_with_one_name_the_others_are_called_with_their_module() -> None:
    modules = repeated(imported_alone())
    ambiguous = {}
    for name, files in repeated(functions()).items():
        names = {_module(file) for file in files}
        if len(names & {*modules.get(name, ())}) > 1:
            ambiguous[name] = files
    assert ambiguous == {}


def _module(file: str) -> str:
    module = file.removesuffix(".py").replace("/", ".")
    return module if module.startswith("ckpt.") else f"ckpt.{module}"


# --- constants -------------------------------------------------------------------------------------------------------


def constants() -> Iterator[tuple[str, str, str]]:
    """Yield name, value and file of each constant of a module; without type variables, and objects that are only compared."""
    for file, tree in trees().items():
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and file not in WITHOUT_CKPT:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                value = ast.unparse(node.value)
                if value.startswith(("TypeVar(", "ParamSpec(", "object()")):
                    continue
                if isinstance(target, ast.Name) and target.id.isupper():
                    yield target.id, value, file


def test_a_public_constant_is_defined_once() -> None:
    assert repeated((name, file) for name, _, file in constants() if not name.startswith("_")) == {}


def test_constants_of_one_name_and_value_are_defined_once() -> None:
    """Numbers of one digit may be equal by chance."""
    found = ((f"{name.strip('_')} = {value}", file) for name, value, file in constants() if not re.fullmatch(r"\d", value))
    assert repeated(found) == {}


def test_an_environment_variable_is_named_once() -> None:
    found = (
        (node.value, file)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"CKPT_[A-Z_]+", node.value)
        if file not in WITHOUT_CKPT
    )
    assert repeated(found) == {}


# --- other names for imports -----------------------------------------------------------------------------------------


def renamed_imports() -> Iterator[tuple[str, str, str]]:
    """Yield the other name, the own name with its module, and the file of each import of this project under another name."""
    for file in sorted(file for folder in (*CODE, "tests", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None)
                for alias in node.names:
                    name = alias.name if module is None else f"{module}.{alias.name}"
                    if alias.asname and name.startswith(("ckpt.", "helpers.")):
                        yield alias.asname, name, str(file.relative_to(ROOT))


def test_an_import_under_another_name_keeps_a_word_of_its_own() -> None:
    """So `scrub` is not imported as `surveys`. A word and its plural count as one."""
    other_words = [
        found
        for found in renamed_imports()
        if not any(own.startswith(word[:4]) for own in _words(found[1].split(".", 1)[1]) for word in _words(found[0]))
    ]
    assert other_words == []


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[_.]", name.lower()) if len(word) > 1]
