"""The commands and programs of all pages but the tutorial run, and print what the pages show."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from helpers.docs_pages import DOCS, PAGES, Block, blocks, changed, diff_lines, masked, matches
from helpers.docs_snippets import Runner, differences


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    with Runner(tmp_path / "me") as runner:
        found = differences(runner, [page])
    assert not found, "\n\n".join(found)


def test_each_block_that_is_not_run_gives_a_reason() -> None:
    assert [block.where for page in DOCS.rglob("*.md") for block in blocks(page) if block.not_run == ""] == []


def test_a_task_is_a_change_of_at_most_ten_lines() -> None:
    """The blocks of a page that change one file are one task."""
    changed_lines: Counter[str] = Counter()
    for page in DOCS.glob("howto/*.md"):
        for block in blocks(page):
            if block.kind == "diff":
                changed_lines[f"{page.name}: {block.title}"] += diff_lines(block)
    assert len(changed_lines) > 10
    assert {task: lines for task, lines in changed_lines.items() if lines > 10} == {}


# --- the runner of the pages -----------------------------------------------------------------------------------------


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("helpers.docs_pages.ROOT", tmp_path)
    with Runner(tmp_path / "me") as runner:
        yield runner


def test_different_output_is_reported(runner: Runner, tmp_path: Path) -> None:
    page = page_of(tmp_path, "```console\n$ echo one\none\n$ echo two\nthree\n```\n")
    (found,) = differences(runner, [page])
    assert found == "page.md:2 shows\nthree\nand prints\ntwo"


def test_a_failed_command_is_reported(runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="`false` ended with 1"):
        differences(runner, [page_of(tmp_path, "```console\n$ false\n```\n")])


def test_the_shell_and_python_keep_their_state_between_blocks(runner: Runner, tmp_path: Path) -> None:
    text = """
```python title="program.py"
print("before")
```

```diff title="program.py"
-print("before")
+print("after")
```

```console
$ mkdir folder
$ x=3
$ echo $x && python program.py
3
after
$ (exit 5)
$ echo $?
5
```

```python
y = 7
```

```python
print(y)
```

```text
7
```
"""
    assert differences(runner, [page_of(tmp_path, text)]) == []


def test_failed_python_or_different_output_of_it_is_reported(runner: Runner, tmp_path: Path) -> None:
    page = page_of(tmp_path, "```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert differences(runner, [page]) == ["page.md:6 shows\n2\nand prints\n1"]
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        differences(runner, [page_of(tmp_path, "```python\n1 / 0\n```\n")])


def test_varying_values_are_masked() -> None:
    assert masked("took 0.3 s at 2026-11-25 20:59:27", ()) == ["took <duration> at <time>"]
    assert masked("loss 0.37", (r"loss \d+\.\d+",)) == ["<varies>"]


@pytest.mark.parametrize(
    ("expected", "same"),
    [
        ("a\nb\nc", True), ("a\n…", True), ("…\nc", True), ("a\n…\nc", True), ("a\nb…\nc", True), ("a\n…\nd", False),
        ("a\nb", False),
    ],
)  # fmt: skip
def test_an_ellipsis_matches_any_text_or_any_lines(expected: str, same: bool) -> None:
    assert matches(expected.splitlines(), ["a", "b", "c"]) == same


def test_a_diff_applies_at_one_place_only() -> None:
    assert changed("a\nb\nc\n", " a\n-b\n+x\n+y\n", "here") == "a\nx\ny\nc\n"
    with pytest.raises(AssertionError, match="occur 2 times in the file"):
        changed("a\na\n", "-a\n", "here")


def test_diff_lines_counts_changed_lines() -> None:
    assert diff_lines(Block(Path(), 1, "diff", "f", " a\n-b\n+c\n+d\n")) == 3
