"""The name of a test is a sentence about behaviour, and nothing of the history of the code; its file is short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]

_HISTORY = re.compile(r"_(regression|issue|bug|fixed|bugfix|old_bug|no_longer|anymore|any_more|formerly|previously)(_|$)")
_OF_ANOTHER_SUITE = frozenset(["tests/integration/fsspec/test_zarr_suite.py"])
"""Files with a suite of another library, whose names they repeat."""


def all_tests() -> Iterator[tuple[str, str]]:
    """Yield the names of all tests, each with its file."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT))
        if file not in _OF_ANOTHER_SUITE:
            nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
            yield from ((node.name, file) for node in nodes if node.name.startswith("test_"))


def test_names_have_three_words_or_more() -> None:
    assert [found for found in all_tests() if found[0].count("_") < 3] == []


def test_names_have_no_history() -> None:
    assert [found for found in all_tests() if _HISTORY.search(found[0])] == []


def test_each_file_says_what_it_tests() -> None:
    files = {file for _, file in all_tests()}
    assert [file for file in sorted(files) if not ast.get_docstring(ast.parse((ROOT / file).read_text()))] == []


def test_files_have_at_most_400_lines() -> None:
    files = {file for _, file in all_tests()}
    assert [file for file in sorted(files) if (ROOT / file).read_text().count("\n") > 400] == []
