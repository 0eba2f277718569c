"""Comments, docstrings and messages of the code are plain English, and messages are short."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("ckpt", "storage", "aggregator", "recovery", "tools")
FOLDERS = (*CODE, "tests", "examples", "benchmarks", ".ci")

MOST_CHARACTERS = 200
_PLACEHOLDER = "x" * 6
"""Stands for a value in a message: most are short, such as a rank, a step or a type."""

AVOIDED = {
    r"\b(the|at|since|from) begin\b(?! and)": "the start, or the beginning",
    r"\btold\b|\bheard\b(?!:)": "reported, published, given",
    r"\bsays not\b|\btells? not\b": "does not say",
    r"\b(has|have) not (the|a|an)\b": "does not have the",
    r"\b(is|are) no (hang|whole|complete|plain)\b": "is not a",
    r"(?<![Tt]here )\bis no (file|folder|number|index|step|state|text|optimizer|parameter|address|container)\b": "is not a",
}
"""Wordings that read like another language, and what to write instead."""


def files_of(folder: str) -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for file in (ROOT / folder).rglob("*.py") if file != Path(__file__))


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def prose(file: str) -> Iterator[str]:
    """Yield the comments and all texts of several words of a file: docstrings, messages and help."""
    source = (ROOT / file).read_text()
    yield from (t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT)
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield " ".join(node.value.split())


def messages(file: str) -> Iterator[str]:
    """Yield the texts of one line that are passed to a call as positional arguments: of errors, warnings and logs."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call):
            texts = (_text(argument) for argument in node.args)
            yield from (text for text in texts if " " in text and "\n" not in text)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else _PLACEHOLDER for part in node.values)
    return ""


@pytest.mark.parametrize("folder", CODE)
def test_messages_have_at_most_200_characters(folder: str) -> None:
    long = [(file, text) for file in files_of(folder) for text in messages(file) if len(text) > MOST_CHARACTERS]
    assert long == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_are_plain_english(folder: str) -> None:
    wrong = [
        (file, found[0], text, better)
        for file in files_of(folder)
        for text in prose(file)
        for words, better in AVOIDED.items()
        if (found := re.search(words, text))
    ]
    assert wrong == []
