"""The name of a test is a sentence about behaviour, and nothing of the history of the code; its file is short."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

_HISTORY = re.compile(r"_(regression|issue|bug|fixed|bugfix|old_bug|no_longer|anymore|any_more|formerly|previously)(_|$)")
_OF_ANOTHER_SUITE = frozenset(["tests/integration/fsspec/test_zarr_suite.py"])
"""Files with a suite of another library, whose names they repeat."""


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of all files with tests."""
    files = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    return {file: ast.parse(path.read_text()) for file, path in files.items() if file not in _OF_ANOTHER_SUITE}


@cache
def all_tests() -> list[tuple[str, str]]:
    """Return the names of all tests, each with its file."""
    nodes = ((node, file) for file, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [(node.name, file) for node, file in nodes if node.name.startswith("test_")]


def test_names_have_three_words_or_more() -> None:
    assert [found for found in all_tests() if found[0].count("_") < 3] == []


def test_names_have_no_history() -> None:
    assert [found for found in all_tests() if _HISTORY.search(found[0])] == []


def test_each_file_says_what_it_tests() -> None:
    assert [file for file, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_files_have_at_most_400_lines() -> None:
    assert [file for file in trees() if (ROOT / file).read_text().count("\n") > 400] == []
