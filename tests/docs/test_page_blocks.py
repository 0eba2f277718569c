"""Each block of a page is run, or in a file that a later block uses, or gives the reason why not; no page has other code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.docs_pages import PAGES, ROOT, TUTORIAL, blocks, blocks_without_use, indented_blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_is_run_or_gives_a_reason(page: Path) -> None:
    assert blocks_without_use(blocks(page)) == []


def test_each_block_of_the_tutorial_is_run_or_gives_a_reason() -> None:
    assert blocks_without_use([block for page in TUTORIAL for block in blocks(page)]) == []


@pytest.mark.parametrize("page", [*TUTORIAL, *PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_all_code_is_in_blocks(page: Path) -> None:
    assert indented_blocks(page) == []


@pytest.mark.parametrize("page", [*TUTORIAL, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_mask_hides_no_words(page: Path) -> None:
    """A mask is for numbers, times and an order that differ from run to run; `.*` would hide everything that is printed."""
    wide = [f"{block.where}: {mask}" for block in blocks(page) for mask in block.varies if re.search(r"(?<!\\)\.[*+?]", mask)]
    assert wide == []


# --- the checks themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```console\n$ ls\n```\n", []),
        ("```python\nprint(1)\n```\n\n```text\n1\n```\n", []),
        ('```python title="a.py"\nprint(1)\n```\n\n```console\n$ python a.py\n1\n```\n', []),
        ("<!-- not run: needs a cluster -->\n```sh\nsbatch job\n```\n", []),
        ("```sh\nls\n```\n", ["page.md:2: a block of the kind 'sh' is not run"]),
        ("```\nls\n```\n", ["page.md:2: a block of the kind '' is not run"]),
        ("```text\n1\n```\n", ["page.md:2: a block of the kind 'text' is not run"]),
        ("```diff\n+a\n```\n", ["page.md:2: a block of the kind 'diff' is not run"]),
        ("<!-- needs: jax -->\n```python\n1\n```\n\n```text\n1\n```\n", ["page.md:7: a block of the kind 'text' is not run"]),
        ('```yaml title="a.yml"\nx: 1\n```\n\n```console\n$ cat b.yml\n```\n', ["page.md:2: no later block uses a.yml"]),
        ('```toml title="a"\n```\n\n<!-- not run: - -->\n```console\n$ cat a\n```\n', ["page.md:2: no later block uses a"]),
    ],
)  # fmt: skip
def test_a_block_without_use_is_found(text: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.docs_pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    assert blocks_without_use(blocks(page)) == found


def test_indented_code_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.docs_pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Run\n\n    $ ls\n    a\n\n- a list\n  of lines\n\n```python\nif x:\n\n    y()\n```\n")
    assert indented_blocks(page) == ["page.md:3: $ ls"]
