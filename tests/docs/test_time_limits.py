"""Every time limit of a test on a wait is long enough for a busy machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helpers.folders import TESTS

SHORTEST_SECONDS = 300
"""The shortest limit. While 30 processes shared two processors, a process of a test took 150 s."""
LONGEST_PAUSE_SECONDS = 15
"""Up to this, a limit is a pause: the test expects that nothing happens in this time, or continues without it."""


_WAITS = ("communicate", "wait", "check_output", "check_call", "join", "result", "acquire", "until")


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)


def _limits_of_call(call: ast.Call) -> list[ast.expr]:
    """Return the limits of a call that waits for a process, a thread or an event."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = call.func.value.id if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) else ""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
    if name in _WAITS or (owner, name) == ("subprocess", "run"):
        return given + (call.args[:1] if name in ("wait", "join", "result") else [])
    return []


def limits(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """Yield the line and the seconds of each constant limit: of a call, a deadline, or the default of a parameter."""
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            values = _limits_of_call(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            values = [node.right] if ast.unparse(node.left) in ("time.monotonic()", "time.time()") else []
        elif isinstance(node, ast.arguments):
            named = (node.posonlyargs + node.args)[-len(node.defaults) :] if node.defaults else []
            pairs = [*zip(named, node.defaults, strict=True), *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
            values = [default for argument, default in pairs if argument.arg == "timeout" and default is not None]
        for value in values:
            if _is_number(value):
                yield value.lineno, ast.literal_eval(value)


def test_no_limit_is_shorter_than_a_busy_machine_needs() -> None:
    found = {
        (path, line, seconds) for path in sorted(TESTS.rglob("*.py")) for line, seconds in limits(ast.parse(path.read_text()))
    }
    assert len(found) > 100
    short = [f"{path.relative_to(TESTS)}:{line}: {seconds} s" for path, line, seconds in sorted(found)
             if LONGEST_PAUSE_SECONDS < seconds < SHORTEST_SECONDS]  # fmt: skip
    assert short == [], f"use {SHORTEST_SECONDS} s or more"
