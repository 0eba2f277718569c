"""The docstring of each package describes its purpose, its guarantees, its users, and where to start reading."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))
import map as code_map  # noqa: E402
import parts  # noqa: E402

PACKAGES = {
    name: ast.get_docstring(ast.parse(path.read_text())) or ""
    for name, path in parts.modules().items()
    if path.name == "__init__.py"
}


def joined(package: str) -> str:
    """Return the docstring of a package as one line."""
    return " ".join(PACKAGES[package].split())


def users(package: str) -> str:
    """Return what its docstring says about the users of a package."""
    found = re.search(r"Used (?:by|through) (.*?)(?:[.;] |$)", joined(package))
    assert found is not None, f"{package}: write who uses it"
    return found[1]


def importers(package: str) -> list[set[str]]:
    """Return the packages that import a package, each as the names of its layer and of itself."""
    found = (part for part, imported in code_map.part_edges().items() if package in imported)
    return [set(part.split(".")) - {"ckpt"} for part in found]


def test_the_packages_are_found() -> None:
    assert len(PACKAGES) > 35


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_docstring_of_three_to_ten_lines(package: str) -> None:
    assert 3 <= len(PACKAGES[package].splitlines()) <= 10


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_its_guarantees_its_users_and_where_to_start(package: str) -> None:
    assert "Guarantees: " in joined(package)
    assert users(package)
    assert re.search(r"Start with (the file|`)", joined(package))


@pytest.mark.parametrize("package", [package for package in PACKAGES if importers(package)])
def test_a_package_names_the_packages_that_import_it(package: str) -> None:
    text = users(package)
    named = {name.rpartition(".")[2] for name in re.findall(r"`([^`]+)`", text)} - set(package.split("."))
    if not re.search(r"\b(above|all)\b", text):
        assert [names for names in importers(package) if not names & named] == [], "it does not name these users"
    parts_named = named & {part.rpartition(".")[2] for part in code_map.part_edges()}
    assert parts_named <= set().union(*importers(package)), "a named user does not import it"
