"""The blocks of a page of the documentation, and how their output is compared with the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HOME = "/home/me"
"""What pages call the folder in which a test runs them."""
HOST = "host1"
"""What they call the machine."""
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
    """Of its first line of text, from 1."""
    kind: str
    title: str | None
    text: str
    varies: tuple[str, ...] = ()
    not_run: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    found: list[Block] = []
    varies: list[str] = []
    not_run: str | None = None
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if comment := re.fullmatch(r"\s*<!-- (varies|not run): (.*) -->", line):
            if comment[1] == "varies":
                varies.append(comment[2])
            else:
                not_run = comment[2]
            continue
        opened = re.fullmatch(r"( *)```(\w+)(?: title=\"([^\"]+)\")?.*", line)
        if opened is None:
            if line.strip():
                varies, not_run = [], None
            continue
        begin, indent = number, len(opened[1])
        while lines[number].strip() != "```":
            number += 1
        text = "".join(f"{line[indent:]}\n" for line in lines[begin:number])
        number += 1
        found.append(Block(page, begin + 1, opened[2], opened[3], text, tuple(varies), not_run))
        varies, not_run = [], None
    return found


def masked(text: str, varies: Sequence[str] = ()) -> list[str]:
    """The lines of an output, without what differs from run to run."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for pattern, what in [*((pattern, "<varies>") for pattern in varies), *_MASKS]:
        text = re.sub(pattern, what, text, flags=re.MULTILINE)
    return [line.rstrip() for line in text.strip().splitlines()]


def matches(expected: Sequence[str], actual: Sequence[str]) -> bool:
    """Whether an output is as the page shows it, where `…` is any text, and a line of it any lines."""
    if not expected:
        return not actual
    first, *rest = expected
    if first.strip() == "…":
        return any(matches(rest, actual[i:]) for i in range(len(actual) + 1))
    pattern = ".*".join(map(re.escape, first.split("…")))
    return bool(actual) and re.fullmatch(pattern, actual[0]) is not None and matches(rest, actual[1:])


@dataclass
class _Output:
    """What the page shows, and what was printed."""

    block: Block
    shown: str
    printed: str


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and the output below it."""
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
    """A file with the lines of a diff: runs of context, `-` and `+` lines, found by their text."""
    old = [line[1:] for line in diff.splitlines() if not line.startswith("+")]
    new = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    lines = text.splitlines()
    at = [i for i in range(len(lines) - len(old) + 1) if lines[i : i + len(old)] == old]
    assert len(at) == 1, f"{where}: the lines that the diff shows are {len(at)} times in the file"
    return "".join(f"{line}\n" for line in [*lines[: at[0]], *new, *lines[at[0] + len(old) :]])


def diff_lines(block: Block) -> int:
    """How many lines a diff adds or takes away."""
    return sum(line.startswith(("+", "-")) for line in block.text.splitlines())
