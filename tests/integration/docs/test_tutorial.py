"""The tutorial, as a reader would type it: four pages in one shell, each of which continues where the previous one ended."""

from __future__ import annotations

from pathlib import Path

from helpers.docs_pages import DOCS, TUTORIAL, blocks
from helpers.docs_snippets import INSTALLED, Runner, checkout, differences


def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    with Runner(tmp_path / "me", INSTALLED) as runner:
        checkout(tmp_path / "me" / "ckpt")
        found = differences(runner, TUTORIAL)
    assert not found, "\n\n".join(found)


def test_every_block_of_the_tutorial_is_run() -> None:
    assert sorted(DOCS.glob("tutorial/*.md")) == sorted(TUTORIAL)
    assert [block.where for page in TUTORIAL for block in blocks(page) if block.not_run is not None] == []
