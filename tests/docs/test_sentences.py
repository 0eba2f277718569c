"""Comments, docstrings, messages, names and pages are plain English, and messages are short."""

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
_LONG_PLACEHOLDER = "x" * 25
_LONG_VALUES = frozenset(["url", "path", "where", "name"])
"""Variables and attributes whose values are longer."""
_MEASUREMENTS = ("tools/codec_choice_display.py",)
"""Files whose long texts are not messages but lines of measurements, which ckpt-inspect prints."""

AVOIDED = {
    r"\b(the|at|since|from) begin\b(?! and)": "the start, or the beginning",
    r"\btold\b|\bheard\b": "reported, published, given",
    r"\bfor ever\b": "permanently, endlessly",
    r"\b(go|goes|went) on (?!\d)(?!\w+ing\b)|\b(go|goes|went) on$": "continues",
    r"\b(is|are|was|were) passed over\b": "skipped",
    r"\b[Ll]ines? of training\b": "training line",
    r"\b[Gg]uardian\b": "orphan guard",
    r"\bas (SIG\w+|drain|x{6}) asked\b|\bnot well\b": "on SIGTERM, with a failure",
    r"\bas it was asked to\b": "as requested",
    r"\bsays not\b|\btells? not\b": "does not say",
    r"\b(has|have) not (the|a|an)\b": "does not have the",
    r"(?<![Tt]here )\b(is|are|was|were) no (?!error|longer|more)\w+": "is not a",
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


@cache
def constants() -> dict[str, str]:
    """Return the texts of all constants of modules, by name."""
    return {
        name: node.value.value
        for folder in CODE
        for file in files_of(folder)
        for node in tree(file).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if (name := ast.unparse(node.targets[0])).isupper()
    }


class _Texts:
    """The messages in a syntax tree: texts of one line without docstrings, also those that are put together first."""

    def __init__(self, module: ast.Module) -> None:
        self._module = module
        self._parents = {child: node for node in ast.walk(module) for child in ast.iter_child_nodes(node)}

    def __iter__(self) -> Iterator[str]:
        seen = {id(node.value) for node in ast.walk(self._module) if isinstance(node, ast.Expr)}
        for node in ast.walk(self._module):  # a text comes before its parts
            if id(node) not in seen and _is_text(node):
                seen.update(map(id, ast.walk(node)))
                text = re.sub(r"%(\.\d+)?[dfgrs]", _PLACEHOLDER, self._longest(node))
                if " " in text and "\n" not in text and "; exec(" not in text:
                    yield text

    def _longest(self, node: ast.AST) -> str:
        """Return a text with its values: the longest text that a variable or constant has, else a placeholder."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.FormattedValue):
            return self._longest(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._longest, node.values))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._longest(node.left) + self._longest(node.right)
        if isinstance(node, ast.IfExp):
            return max(self._longest(node.body), self._longest(node.orelse), key=len)
        name = ast.unparse(node).rpartition(".")[2]
        if isinstance(node, ast.Name) and (assigned := [*self._assigned(node)]):
            return max(map(self._longest, assigned), key=len)
        return constants().get(name, _LONG_PLACEHOLDER if name in _LONG_VALUES else _PLACEHOLDER)

    def _assigned(self, name: ast.Name) -> Iterator[ast.expr]:
        """Yield the texts that the function around a name assigns to it, unless they contain the name itself."""
        at: ast.AST = name
        while not isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            at = self._parents[at]
        for node in ast.walk(at):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.NamedExpr) else []
            if name.id in map(ast.unparse, targets):
                value: ast.expr = node.value  # type: ignore[attr-defined]
                if (_is_text(value) or isinstance(value, ast.IfExp)) and name.id not in ast.unparse(value):
                    yield value


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add))
    )


@pytest.mark.parametrize("folder", CODE)
def test_messages_have_at_most_200_characters(folder: str) -> None:
    files = [file for file in files_of(folder) if file not in _MEASUREMENTS]
    assert [(file, text) for file in files for text in _Texts(tree(file)) if len(text) > MOST_CHARACTERS] == []


def test_a_message_counts_with_the_texts_of_its_variables_and_constants() -> None:
    source = """
def f(store, n):
    what = f"{store.url} is damaged" if n else "a short text"
    raise CkptError(f"{what}; {DAMAGE_ADVICE}")
"""
    *_, text = sorted(_Texts(ast.parse(source)), key=len)
    assert text == f"{_LONG_PLACEHOLDER} is damaged; {constants()['DAMAGE_ADVICE']}"


@pytest.mark.parametrize("folder", ["ckpt/repository", "ckpt/loading", "ckpt/format", "ckpt/block_io"])
def test_errors_of_damaged_files_say_what_to_do(folder: str) -> None:
    """Except those of a codec and of one block, which become a part of such a message."""
    raises = [
        (file, ast.unparse(node.exc))
        for file in files_of(folder)
        if Path(file).name not in ("stored_block_check.py", "bounded_decode.py", "float_planes.py")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Raise) and node.exc is not None and ast.unparse(node.exc).startswith("IntegrityError(")
    ]
    assert raises
    assert [found for found in raises if not re.search(r"another step|DAMAGE_ADVICE|damage_text", found[1])] == []


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


PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md"))]


def test_pages_are_plain_english() -> None:
    texts = [(page, re.sub(r"\s+", " ", page.read_text())) for page in PAGES]
    assert len(texts) > 70
    wrong = [
        (str(page.relative_to(ROOT)), found[0], better)
        for page, text in texts
        for words, better in AVOIDED.items()
        for found in re.finditer(words, text)
    ]
    assert wrong == []


REPLACED_WORDS = frozenset(["told", "heard", "said", "wanted", "voice", "keepers", "caretaker", "excuse", "excused"])
"""Words of names that the glossary, or a verb such as reported or requested, replaces."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_have_no_replaced_word(folder: str) -> None:
    assert [(file, name) for file in files_of(folder) for name in names(file) if REPLACED_WORDS & set(_words(name))] == []


def names(file: str) -> Iterator[str]:
    """Yield the name of the file, and the names that it defines: functions, classes, arguments, variables and attributes."""
    yield Path(file).stem
    for node in ast.walk(tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)]
