"""The commands and programs of the how-to guides and of operations run, and print what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.docs_pages import DOCS, Block, blocks, changed, diff_lines, masked, matches
from helpers.docs_snippets import Runner, differences

PAGES = sorted([*DOCS.glob("howto/*.md"), *DOCS.glob("operations/*.md")])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page(page: Path, tmp_path: Path) -> None:
    with Runner(tmp_path / "me") as runner:
        found = differences(runner, [page])
    assert not found, "\n\n".join(found)


def test_blocks_that_are_not_run_say_why() -> None:
    assert [block.where for page in DOCS.rglob("*.md") for block in blocks(page) if block.not_run == ""] == []


def test_a_task_is_a_change_of_at_most_ten_lines() -> None:
    for page in DOCS.glob("howto/*.md"):
        for block in blocks(page):
            assert block.kind != "diff" or diff_lines(block) <= 10, block.where


# --- what runs the pages -----------------------------------------------------------------------------------------


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("helpers.docs_pages.ROOT", tmp_path)
    with Runner(tmp_path / "me") as runner:
        yield runner


def test_other_output_is_found(runner: Runner, tmp_path: Path) -> None:
    page = page_of(tmp_path, "```console\n$ echo one\none\n$ echo two\nthree\n```\n")
    (found,) = differences(runner, [page])
    assert found == "page.md:2 shows\nthree\nand prints\ntwo"


def test_a_command_that_fails_is_found(runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="`false` ended with 1"):
        differences(runner, [page_of(tmp_path, "```console\n$ false\n```\n")])


def test_the_shell_and_python_remember(runner: Runner, tmp_path: Path) -> None:
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


def test_python_that_fails_or_prints_something_else_is_found(runner: Runner, tmp_path: Path) -> None:
    page = page_of(tmp_path, "```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert differences(runner, [page]) == ["page.md:6 shows\n2\nand prints\n1"]
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        differences(runner, [page_of(tmp_path, "```python\n1 / 0\n```\n")])


def test_what_varies_is_masked() -> None:
    assert masked("took 0.3 s at 2026-11-25 20:59:27", ()) == ["took <duration> at <time>"]
    assert masked("loss 0.37", (r"loss \d+\.\d+",)) == ["<varies>"]


@pytest.mark.parametrize(
    ("expected", "same"),
    [
        ("a\nb\nc", True), ("a\n…", True), ("…\nc", True), ("a\n…\nc", True), ("a\nb…\nc", True), ("a\n…\nd", False),
        ("a\nb", False),
    ],
)  # fmt: skip
def test_an_ellipsis_is_any_text_or_any_lines(expected: str, same: bool) -> None:
    assert matches(expected.splitlines(), ["a", "b", "c"]) == same


def test_a_change_fits_in_one_place() -> None:
    assert changed("a\nb\nc\n", " a\n-b\n+x\n+y\n", "here") == "a\nx\ny\nc\n"
    with pytest.raises(AssertionError, match="are 2 times in the file"):
        changed("a\na\n", "-a\n", "here")


def test_diff_lines() -> None:
    assert diff_lines(Block(Path(), 1, "diff", "f", " a\n-b\n+c\n+d\n")) == 3
