"""The tables of the reference list exactly the names that the code has."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.storage.base.errors import InvalidArgument

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/reference"
SOURCES = [file for folder in ("ckpt", "storage", "aggregator", "recovery", "tools") for file in (ROOT / folder).rglob("*.py")]


@cache
def constants() -> frozenset[str]:
    """Return every string in the code, without docstrings and comments."""
    return frozenset(text for file in SOURCES for text in _constants(file))


def _constants(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def first_cells(page: str) -> set[str]:
    """Return the names in code style in the first column of each table."""
    rows = [line for line in (PAGES / page).read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_each_environment_variable_is_described() -> None:
    used = {text for text in constants() if re.fullmatch(r"CKPT_[A-Z_]+", text)}
    used |= {name for text in constants() for name in re.findall(r"\b(CKPT_[A-Z_]+)=", text)}
    assert used == first_cells("environment.md")


def test_each_metric_is_described() -> None:
    described = {name.partition("{")[0] for name in first_cells("metrics.md")}
    used = {text for text in constants() if re.fullmatch(r"ckpt_(run|node)_[a-z_]+[a-z]", text)}
    kinds = ("calls", "errors", "seconds", "bytes_received", "bytes_sent", "bytes_near")
    assert set(kinds) <= constants()
    assert used | {f"ckpt_node_{kind}_total" for kind in kinds} == described


def test_alerts_use_existing_metrics() -> None:
    described = {name.partition("{")[0] for name in first_cells("metrics.md")}
    used = set(re.findall(r"ckpt_(?:run|node)_[a-z_]+", (ROOT / "docs/operations/monitoring.md").read_text()))
    assert len(used) > 6
    assert used <= described


def test_each_key_of_the_configuration_is_described() -> None:
    with pytest.raises(InvalidArgument, match="unknown key 'nothing'; use ") as raised:
        config_from_table("lab", {"nothing": 1}, "config.toml")
    keys = set(str(raised.value).partition("use ")[2].split(", "))
    with pytest.raises(InvalidArgument, match="unknown key 'nothing' of a member; use ") as raised:
        config_from_table("lab", {"members": [{"url": "host:1", "nothing": 1}]}, "config.toml")
    keys |= set(str(raised.value).partition("use ")[2].split(", "))
    assert keys == first_cells("configuration.md")


def test_each_verb_of_the_wire_is_described() -> None:
    verbs = {
        node.name.removeprefix("_verb_").replace("_", ".")
        for file in SOURCES
        if file.parent.is_relative_to(ROOT / "storage")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_verb_")
    }
    assert verbs == {name for name in first_cells("wire.md") if re.fullmatch(r"[a-z.]+", name)}


def test_the_picture_is_up_to_date() -> None:
    draw = runpy.run_path(str(ROOT / ".ci/site/picture.py"))
    assert draw["FILE"].read_text() == draw["picture"](), "run python .ci/site/picture.py"


def test_source_files_that_pages_name_exist() -> None:
    folders = "ckpt|storage|aggregator|recovery|tools|tests|examples|benchmarks"
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
    named = {name for page in pages for name in re.findall(rf"\b(?:{folders})/[\w/]+\.py\b", page.read_text())}
    assert len(named) > 40
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_the_api_reference_has_each_adapter_that_a_page_names() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {name for page in pages for name in re.findall(r"ckpt\.adapters\.\w+", page.read_text())}
    assert named
    assert named - set(runpy.run_path(str(ROOT / ".ci/site/pages.py"))["API"]["adapters"][2]) == set()


def test_the_oldest_versions_of_frameworks_are_those_of_the_tests() -> None:
    text = "\n".join(file.read_text() for file in (ROOT / "tests/integration").glob("*/requirements-lowest.txt"))
    tested: dict[str, set[tuple[int, ...]]] = {}
    for package, version in re.findall(r"^([\w\[\]-]+)==([\d.]+)", text, re.MULTILINE):
        tested.setdefault(package, set()).add(tuple(map(int, version.split("."))))
    rows: dict[str, set[tuple[int, ...]]] = {}
    for package, version in re.findall(
        r"^\| `([^`]+)` \| ([\d.]+) \|", (ROOT / "docs/howto/index.md").read_text(), re.MULTILINE
    ):
        rows.setdefault(package, set()).add(tuple(map(int, version.split("."))))
    assert len(rows) > 15
    assert {package: min(versions) for package, versions in rows.items()} == {package: min(tested[package]) for package in rows}
    assert not {package: versions - tested[package] for package, versions in rows.items() if versions - tested[package]}
