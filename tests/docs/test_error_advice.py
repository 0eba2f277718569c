"""Each error that reaches a user says what to do next. What need not say it is listed by rules, each with its reason.

The test reads the texts of errors, and looks for a clause that begins with a verb of the imperative. It finds a message that
only states what happened. It cannot find out whether the advice is right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("ckpt", "storage", "aggregator", "recovery", "tools")

USER_ERRORS = frozenset(
    re.split(
        r"\s+",
        "CkptError InvalidArgument IntegrityError Unavailable StoreError FormatError UnsupportedLeaf LeafMismatch LeafNotFound "
        "StepNotFound StepRefused GroupError Refused SignatureError UnknownScheme SaveFailed NoSpace StagingFailed InvalidName "
        "RepositoryBusy Fenced RanksMissing StepSkipped NotFinite Untrusted StateChanged TimeoutError UsageError BadParameter "
        "ClickException TreeError",
    )
)
"""The errors that reach users. AlreadyExists, Changed, NotFound and Outdated answer a conditional write or a read: their
callers catch them, or a file system turns them into an error number. Malformed and UntrustedValue are causes of others."""

LEAVES = "ckpt/state/"
"""In this folder, a TypeError becomes an UnsupportedLeaf or a LeafMismatch, which add only the leaf and the step."""

NOT_RAISED_TO_USERS = {
    "ckpt/block_io/stored_block_check.py": "saving/dedup.py logs it, and writes the block again",
    "ckpt/format/bounded_decode.py": "block_io/block_reader.py adds the leaf, the file and the advice",
    "ckpt/format/float_planes.py": "block_io/block_reader.py adds the leaf, the file and the advice",
    "aggregator/cluster/fanout.py": "a reason in the message about members that do not answer",
    "aggregator/file_io/fragment_reader.py": "a reason in the message about a stripe that can't be read",
    "aggregator/file_io/rebuild.py": "a reason in the report of a repair, which tries again",
    "aggregator/file_io/source_objects.py": "a reason in the report of a repair, which tries again",
    "aggregator/placement/erasure.py": "the callers give enough fragments",
    "ckpt/adapters/dcp_group.py": "the callers ask can_gather first",
    "storage/testing.py": "a test of a store",
}

FROM_ELSEWHERE = {
    "ckpt/adapters/torch_experts.py": "the texts are those of the calls of _Rule.error, which this test reads",
    "ckpt/groups/rendezvous_notes.py": "another rank's error",
    "ckpt/saving/failure_reports.py": "another rank's error",
    "ckpt/saving/rank_part_merge.py": "replica_check.missing_copies_text ends with advice",
    "ckpt/state/leaves/mindspore.py": "the texts of the table _COMPOSITES end with advice",
    "ckpt/state/leaves/tensorflow.py": "the texts of the table _COMPOSITES end with advice",
    "ckpt/tiers/background_copier.py": "_stalled_message ends with advice",
    "storage/node/client.py": "the error of a node",
    "storage/node/wire.py": "the error of a node",
}
"""Files that raise an error of another process or thread again, if its text is all that follows."""

VERBS = (
    "add|announce|append|ask|build|call|change|check|choose|close|compile|construct|convert|copy|correct|create|delete|divide|"
    "download|drop|end|enter|export|find|fix|free|give|import|initialise|initialize|install|keep|leave|let|list|load|look|lower|"
    "make|map|mean|mount|move|name|number|offload|open|pass|pip|put|raise|read|redistribute|register|remove|rename|repair|replace|"
    "reshard|restart|restore|run|save|see|select|send|set|skip|start|stop|store|take|try|turn|unset|update|use|wait|wrap|write"
)

ADVICE = re.compile(
    r"(?:^|[:;,.(»] |\bor |\band |\bso )"  # where a clause begins; » is the end of a value
    r"(?:(?:if|in|on|for|to|with) [^,;:]{2,60},? |first |then |also |else |did you )?"
    rf"(?:{VERBS})\b"
)
RULE_FOR_THE_CALLER = re.compile(r"\b(must|needs?|exclude each other)\b")
"""A message may state what an argument, an option or a call must be."""

POSSIBLE_VALUES = re.compile(r"\b(it has|which has|its members are|numbered from|there are) [«0-9]")
"""A message may list what can be given."""

NAMED_ADVICE = re.compile(
    r"ADVICE|HINT|_REPAIR|HOW_TO|SHUTTING_DOWN|describe_os_error|describe_unreadable_file|suggest\(|damage_text|_remedy|advice|instead"
)
"""Names of constants, functions and variables that are advice."""

FILLERS = re.compile(r"\bsee the cause\b|\bcheck (the|your) (input|arguments?|values?|error)\b|\btry again later\b|\bcontact\b")
"""Advice that helps nobody."""


class Message(NamedTuple):
    file: str
    line: int
    kind: str
    text: str
    """Each value in it is the code that computes it, between « and »."""
    is_wrapped: bool
    """Whether it contains another error of these kinds."""

    @property
    def has_advice(self) -> bool:
        words = re.sub(r"«[^»]*»", "«»", self.text)
        return bool(ADVICE.search(words) or RULE_FOR_THE_CALLER.search(words) or POSSIBLE_VALUES.search(words)) or any(
            NAMED_ADVICE.search(value) for value in re.findall(r"«([^»]*)»", self.text)
        )

    @property
    def is_exempt(self) -> bool:
        is_only_a_value = re.search(r"(^|: )«\w+(\(.*\))?»$|^«[^«]*»$", self.text) is not None
        return self.is_wrapped or self.file in NOT_RAISED_TO_USERS or (self.file in FROM_ELSEWHERE and is_only_a_value)


class _File:
    """The errors in the syntax tree of one file."""

    def __init__(self, file: str, source: str) -> None:
        self._file = file
        self._tree = ast.parse(source)
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}

    def messages(self) -> Iterator[Message]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and node.args and self._is_user_error(node.func):
                kind, text = ast.unparse(node.func), self._text(node.args[0], node)
                yield Message(self._file, node.lineno, kind, text, self._contains_error(node))

    def _is_user_error(self, function: ast.expr) -> bool:
        name = ast.unparse(function).rpartition(".")[2]
        return (
            name in USER_ERRORS
            or ast.unparse(function) == "rule.error"
            or (name == "TypeError" and self._file.startswith(LEAVES))
        )

    def _text(self, value: ast.AST, at: ast.AST) -> str:
        if isinstance(value, ast.Constant):
            return str(value.value)
        if isinstance(value, ast.FormattedValue):
            return self._text(value.value, at)
        if isinstance(value, ast.JoinedStr):
            return "".join(self._text(part, at) for part in value.values)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            return self._text(value.left, at) + self._text(value.right, at)
        if isinstance(value, ast.IfExp):
            return f"{self._text(value.body, at)}; {self._text(value.orelse, at)}"
        if isinstance(value, ast.Name) and (assigned := self._assigned(value.id, at)):
            return "; ".join(self._text(each, each) for each in assigned)
        return f"«{ast.unparse(value)}»"

    def _assigned(self, name: str, at: ast.AST) -> list[ast.expr]:
        """Return the texts that the function around a node gives to a variable."""
        while not isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            at = self._parents[at]
        found = []
        for node in ast.walk(at):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.NamedExpr) else []
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                value: ast.expr = node.value  # type: ignore[attr-defined]
                found += [value] if isinstance(value, (ast.JoinedStr, ast.Constant, ast.IfExp, ast.BinOp)) else []
        return found

    def _contains_error(self, error: ast.Call) -> bool:
        """Return whether a message contains an error whose message has advice: one of these kinds, caught here or earlier."""
        names = {node.id for node in ast.walk(error.args[0]) if isinstance(node, ast.Name)}
        texts = [each for name in names for each in self._assigned(name, error)]
        names |= {node.id for text in texts for node in ast.walk(text) if isinstance(node, ast.Name)}
        at: ast.AST | None = error
        while (at := self._parents.get(at)) is not None and not isinstance(at, ast.FunctionDef):
            if isinstance(at, ast.ExceptHandler):
                return at.name in names and at.type is not None and self._has_advice_itself(at.type)
        parent = self._parents[error]
        return isinstance(parent, ast.Raise) and isinstance(parent.cause, ast.Name) and parent.cause.id in names

    def _has_advice_itself(self, caught: ast.expr) -> bool:
        kinds = {ast.unparse(each).rpartition(".")[2] for each in getattr(caught, "elts", [caught])}
        is_of_leaf = kinds <= {"TypeError", "ValueError"} and self._file.startswith(
            ("ckpt/state/", "ckpt/loading/", "ckpt/adapters/")
        )
        return is_of_leaf or kinds <= USER_ERRORS | {"ParametersMismatch", "NotForkable", "ScriptNotFound"}


@cache
def messages() -> tuple[Message, ...]:
    """Return the messages of all errors that reach users."""
    files = sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py"))
    return tuple(m for file in files for m in _File(str(file.relative_to(ROOT)), file.read_text()).messages())


def test_each_error_of_a_user_says_what_to_do() -> None:
    assert len(messages()) > 700
    assert [message for message in messages() if not message.has_advice and not message.is_exempt] == []


def test_an_error_is_one_sentence() -> None:
    assert [message for message in messages() if re.search(r"[a-z)»`]\. \S", message.text)] == []


def test_no_advice_is_a_filler() -> None:
    assert [message for message in messages() if FILLERS.search(message.text)] == []


def test_each_exception_is_needed() -> None:
    without = {message.file for message in messages() if not message.has_advice and not message.is_wrapped}
    assert {*NOT_RAISED_TO_USERS, *FROM_ELSEWHERE} <= without


@pytest.mark.parametrize(
    ("text", "has_advice"),
    [
        ("f'{path} is damaged'", False),
        ("f'{path} is damaged; restore it from a copy'", True),
        ("f'{url} has steps: the save of {step} failed'", False),
        ("f'{path} is damaged; {DAMAGE_ADVICE}'", True),
        ("f'step={step}: it must be a whole number'", True),
        ("f'{path} has no name; it has {names}'", True),
        ("'the use of a second source is wrong'", False),
    ],
)
def test_the_check_finds_advice(text: str, has_advice: bool) -> None:
    (message,) = _File("ckpt/example.py", f"def f():\n    raise CkptError({text})\n").messages()
    assert message.has_advice == has_advice
    assert not message.is_exempt


def test_the_check_follows_variables_and_causes() -> None:
    source = """
def f():
    try:
        g()
    except StoreError as error:
        raise SaveFailed(f"saving failed: {error}") from error
    except OSError as error:
        message = f"saving failed: {error}"
        raise SaveFailed(message) from error
"""
    wrapped, other = _File("tools/example.py", source).messages()
    assert wrapped.is_exempt
    assert not other.is_exempt
    assert not other.has_advice
