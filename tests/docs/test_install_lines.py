"""The pages name the extras that install what they need, and these extras exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from helpers.docs_pages import DOCS, ROOT, blocks

EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
INSTALL = re.compile(r"pip install [^`\n]*?\.\[([\w,]+)\]")


def extras_of(page: Path) -> list[str]:
    """Return the extras that a page installs from the clone."""
    return [extra for found in INSTALL.findall(page.read_text()) for extra in found.split(",")]


def test_each_extra_of_a_page_exists() -> None:
    named = {extra for page in PAGES for extra in extras_of(page)}
    assert {"torch", "orbax"} <= named <= EXTRAS


FRAMEWORK_PAGES = [page for page in PAGES if page.parent.name == "howto" and any(block.framework for block in blocks(page))]


@pytest.mark.parametrize("page", FRAMEWORK_PAGES, ids=lambda page: page.stem)
def test_a_page_whose_programs_need_a_framework_has_a_line_that_installs_ckpt(page: Path) -> None:
    assert re.search(r'pip install "?\.', page.read_text())


def test_a_page_installs_from_the_clone_because_no_release_is_on_pypi() -> None:
    """Deployment says when the name works: once ckpt is installed."""
    assert [page.stem for page in PAGES if "ckpt-store[" in page.read_text()] == ["deployment"]
