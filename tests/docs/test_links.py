"""Each link in the README, in a page, or in a file beside them names a file, and a heading of it, that exist."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from helpers.docs_pages import DOCS, ROOT

PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md"))]
GENERATED = {DOCS / name for name in runpy.run_path(str(ROOT / ".ci/site/pages.py"))["all_pages"]()}
"""Pages that only the built site has."""

_FENCE = re.compile(r"^ *```.*?^ *```\n", re.MULTILINE | re.DOTALL)


def without_code(page: Path) -> str:
    """Return the text of a page without its blocks."""
    return _FENCE.sub("", page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page: those of its headings, and the ids in its text."""
    text = without_code(page)
    found: list[str] = re.findall(r'id="([^"]+)"', text)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower()
        found.append(re.sub(r"\s", "-", words))
    return frozenset(found)


def dead_links(page: Path) -> list[str]:
    """Return the relative links of a page whose file or heading does not exist."""
    dead = []
    text = re.sub(r"`[^`\n]*`", "", without_code(page))
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:href|src)="([^"]+)"', text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target in GENERATED:
            continue
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A `name`: more\n")
    page.write_text(
        "[a](other.md#a-name-more) [b](other.md#b) [c](no.md) [d](#here) [e](https://example.com)\n\n## Here\n`[f](g)`\n"
    )
    assert dead_links(page) == ["other.md#b", "no.md"]
