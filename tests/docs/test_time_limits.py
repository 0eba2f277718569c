"""The limit after which a test gives up on a process is long enough for a busy machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helpers.folders import TESTS

SHORTEST_SECONDS = 300
"""The shortest limit. While 30 processes shared two processors, a process of a test took 150 s."""
LONGEST_PAUSE_SECONDS = 15
"""A shorter limit is a pause: the test expects that nothing happens in this time, or continues without it."""


def limits(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """Yield the line and the seconds of each constant limit of a wait for a process or an event."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
        if call.func.attr not in ("communicate", "wait", "check_output", "check_call") and (owner, call.func.attr) != (
            "subprocess",
            "run",
        ):
            continue
        values = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
        if call.func.attr == "wait":
            values += call.args[:1]
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
                yield value.lineno, value.value


def test_no_limit_is_shorter_than_a_busy_machine_needs() -> None:
    found = {
        (path, line, seconds) for path in sorted(TESTS.rglob("*.py")) for line, seconds in limits(ast.parse(path.read_text()))
    }
    assert len(found) > 100
    short = [f"{path.relative_to(TESTS)}:{line}: {seconds} s" for path, line, seconds in sorted(found)
             if LONGEST_PAUSE_SECONDS < seconds < SHORTEST_SECONDS]  # fmt: skip
    assert short == []
