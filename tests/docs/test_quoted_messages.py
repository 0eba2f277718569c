"""The tables of symptoms quote messages of the code: each quoted part is in a message."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("ckpt", "storage", "aggregator", "recovery", "tools")

QUOTES = {
    "docs/operations/troubleshooting.md": re.compile(r"^\| (?:`\w+`(?:, `\w+`)*|a warning): ([^|`]+) \|", re.MULTILINE),
    "docs/howto/why-restarted.md": re.compile(r"^\| ([^|`]+) \| (?!what happens)", re.MULTILINE),
}
"""The first column of the rows that quote a message, by page."""

OF_PYTHON = re.compile(r"^(module 'ckpt' has no attribute|No module named)")


@cache
def texts() -> str:
    """Return all texts of the code, each value in them as `…`."""
    found = []
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            module = ast.parse(file.read_text())
            for node in ast.walk(module):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def quoted_parts(page: str) -> Iterator[str]:
    """Yield the parts of quotes that stand between values, commas and alternatives."""
    for quote in QUOTES[page].findall((ROOT / page).read_text()):
        yield from (part for part in re.split(r" ?…,? ?|, or |, | or ", quote.strip()) if part and not OF_PYTHON.search(part))


def test_quoted_messages_exist() -> None:
    quoted = [(page, part) for page in QUOTES for part in quoted_parts(page)]
    assert len(quoted) > 15
    assert [(page, part) for page, part in quoted if part not in texts()] == []
