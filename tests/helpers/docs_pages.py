"""The blocks of a page of the documentation, and the comparison of their output with the page."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TUTORIAL = [DOCS / f"tutorial/{name}.md" for name in ("first-run", "many-ranks", "namespace", "supervised")]
"""These pages continue each other; the others are independent."""
PAGES = sorted(page for page in DOCS.rglob("*.md") if page not in TUTORIAL)
HOME = "/home/me"
"""The name of a test's folder on the pages."""
HOST = "host1"
"""The name of this machine on the pages."""
_SECONDS = 240
_FILES = ("python", "toml", "yaml", "text", "bash", "json")
_MASKS = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?", "<time>"),
    (r"\d{4}-\d\d-\d\dT[\d:.+]+Z?", "<time>"),
    (r"\b\d\d:\d\d:\d\d\b", "<time>"),
    (r"\b\d+(\.\d+)? (ms|s|min|h)\b", "<duration>"),
    (r"\bpid \d+", "pid <number>"),
    (r" +", " "),
)
_ENDED = re.compile(r"^bash: line \d+: +\d+ (Killed|Terminated) +(.*)\n?", re.MULTILINE)
_LISTENS = re.compile(r"\b70[789]0\b|\b71[0-9]0\b|\b80[789]0\b|\b81[0-9]0\b|\b92[0-9]0\b")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    """The line number of its first line of text, from 1."""
    kind: str
    title: str | None
    text: str
    varies: tuple[str, ...] = ()
    not_run: str | None = None
    framework: str | None = None
    """The folder of tests/integration whose environment the block needs."""

    @property
    def where(self) -> str:
        """Return the file and the line of the block."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    found: list[Block] = []
    varies: list[str] = []
    not_run: str | None = None
    framework: str | None = None
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if comment := re.fullmatch(r"\s*<!-- (varies|not run|needs): (.*) -->", line):
            if comment[1] == "varies":
                varies.append(comment[2])
            elif comment[1] == "needs":
                framework = comment[2]
            else:
                not_run = comment[2]
            continue
        opened = re.fullmatch(r"( *)```(\w*)(?: title=\"([^\"]+)\")?.*", line)
        if opened is None:
            if line.strip():
                varies, not_run, framework = [], None, None
            continue
        begin, indent = number, len(opened[1])
        while lines[number].strip() != "```":
            number += 1
        text = "".join(f"{line[indent:]}\n" for line in lines[begin:number])
        number += 1
        found.append(Block(page, begin + 1, opened[2], opened[3], text, tuple(varies), not_run, framework))
        varies, not_run, framework = [], None, None
    return found


def blocks_without_use(of_pages: Sequence[Block]) -> list[str]:
    """Return where a block is that no test runs, that is in no file which a later block uses, and that gives no reason.

    of_pages: the blocks of a page, or of pages that continue each other.
    """
    found: list[str] = []
    before: Block | None = None
    for number, block in enumerate(of_pages):
        is_output = block.kind == "text" and before is not None and before.kind == "python" and before.title is None
        is_output = is_output and before is not None and before.framework == block.framework and before.not_run is None
        later = [each for each in of_pages[number + 1 :] if each.not_run is None and each.kind in ("console", "python")]
        if block.not_run is not None or (block.kind in ("console", "python") and block.title is None):
            pass  # a reason, or run
        elif block.title is not None and block.kind in (*_FILES, "diff"):
            if not any(block.title in each.text for each in later):
                found.append(f"{block.where}: no later block uses {block.title}")
        elif not is_output:
            found.append(f"{block.where}: a block of the kind {block.kind!r} is not run")
        before = block
    return found


def indented_blocks(page: Path) -> list[str]:
    """Return where a page has code that is indented and not in a block; it would be shown as code, and not run."""
    found: list[str] = []
    is_open = False
    lines = ["", *page.read_text().splitlines()]
    for number, (before, line) in enumerate(itertools.pairwise(lines), 1):
        is_open ^= line.lstrip().startswith("```")
        if not is_open and line.startswith("    ") and not before.strip():
            found.append(f"{page.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def masked(text: str, varies: Sequence[str] = ()) -> list[str]:
    """Return the lines of an output, without the parts that differ from run to run."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for pattern, replacement in [*((pattern, "<varies>") for pattern in varies), *_MASKS]:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return [line.rstrip() for line in text.strip().splitlines()]


def matches(expected: Sequence[str], actual: Sequence[str]) -> bool:
    """Return whether an output is as the page shows it; `…` stands for any text, and a line of it for any lines."""
    if not expected:
        return not actual
    first, *rest = expected
    if first.strip() == "…":
        return any(matches(rest, actual[i:]) for i in range(len(actual) + 1))
    pattern = ".*".join(map(re.escape, first.split("…")))
    return bool(actual) and re.fullmatch(pattern, actual[0]) is not None and matches(rest, actual[1:])


@dataclass
class _Output:
    """The output that the page shows, and the output that was printed."""

    block: Block
    shown: str
    printed: str


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block, and the output below it."""
    command: list[str] = []
    shown: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield "\n".join(command), "\n".join(shown)
            command, shown = [line[2:]], []
        elif line.startswith("> ") and not shown:
            command.append(line[2:])
        else:
            shown.append(line)
    if command:
        yield "\n".join(command), "\n".join(shown)


def changed(text: str, diff: str, where: str) -> str:
    """Return a text after a diff: context, `-` and `+` lines, whose position is found by their text."""
    old = [line[1:] for line in diff.splitlines() if not line.startswith("+")]
    new = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    lines = text.splitlines()
    found_at = [i for i in range(len(lines) - len(old) + 1) if lines[i : i + len(old)] == old]
    assert len(found_at) == 1, f"{where}: the lines that the diff shows occur {len(found_at)} times in the file"
    return "".join(f"{line}\n" for line in [*lines[: found_at[0]], *new, *lines[found_at[0] + len(old) :]])


def diff_lines(block: Block) -> int:
    """Return how many lines a diff adds or removes."""
    return sum(line.startswith(("+", "-")) for line in block.text.splitlines())
