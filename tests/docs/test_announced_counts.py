"""Where a page announces a number of things, as in `Six tests do the same:`, the list below has as many."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md"))]

COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
ANNOUNCES = re.compile(
    rf"(?:^|\. )(?:The |These |There are |.* (?:has|have|needs?) )?({'|'.join(COUNTS)}) \w+s\b[^.]*:$", re.IGNORECASE
)
"""A last sentence that begins with a number of things, or says that something has or needs them, and ends with a colon."""


def announced(page: str) -> Iterator[tuple[str, int, int]]:
    """Yield each sentence that announces a list, the number that it has, and the length of the list."""
    paragraphs = re.sub(r"```.*?```", "", page, flags=re.DOTALL).split("\n\n")
    for text, below in zip(paragraphs, paragraphs[1:], strict=False):
        lines = [line for line in below.splitlines() if re.match(r"[-*|] ?|\d+\. ", line)]
        items = lines[2:] if below.startswith("|") else lines
        if items and below[0] in "-*|123456789" and (found := ANNOUNCES.search(" ".join(text.split()))):
            yield found[0].removeprefix(". "), COUNTS[found[1].lower()], len(items)


def test_a_list_has_as_many_items_as_announced() -> None:
    found = [(str(page.relative_to(ROOT)), *each) for page in PAGES for each in announced(page.read_text())]
    assert len(found) >= 4
    assert [each for each in found if each[2] != each[3]] == []
