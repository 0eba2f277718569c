"""A test with larger counts in `make soak` has the mark by which `make soak` selects it."""

from __future__ import annotations

import ast

from helpers.folders import TESTS

SWITCHES = {"SOAK", "CKPT_SOAK"}
"""The name and the environment variable that choose between small and large counts."""


def refers_to(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression or a function uses one of these names, or takes a fixture of such a name."""
    return any(
        (isinstance(each, ast.Name) and each.id in names)
        or (isinstance(each, ast.Constant) and each.value in SWITCHES)
        or (isinstance(each, ast.arg) and each.arg in names)
        for each in ast.walk(node)
    )


def is_marked(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "soak" for each in ast.walk(node))


def unmarked_tests(tree: ast.Module) -> tuple[int, list[str]]:
    """Return how many tests of a module have counts that depend on a switch, and which of them lack the mark."""
    names, before = set(SWITCHES), 0
    while len(names) > before:
        before = len(names)
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.FunctionDef)) and refers_to(node, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node]
                names |= {name for each in targets if (name := getattr(each, "id", getattr(each, "name", None)))}
    marks = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    tests = [
        node for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and refers_to(node, names)
    ]  # fmt: skip
    missing = [test.name for test in tests if not any(is_marked(each) for each in [*test.decorator_list, *marks])]
    return len(tests), missing


def test_each_test_with_larger_counts_has_the_mark() -> None:
    count, missing = 0, []
    for path in sorted(TESTS.rglob("test_*.py")):
        if path.name == "test_soak_marks.py":
            continue
        found, unmarked = unmarked_tests(ast.parse(path.read_text()))
        count += found
        missing += [f"{path.relative_to(TESTS)}::{name}" for name in unmarked]
    assert count > 40
    assert missing == []


def test_a_missing_mark_is_found() -> None:
    module = "COUNT = 9 if SOAK else 1\ndef rounds(): return range(COUNT)\n{}def test_rounds(): assert list(rounds())\n"
    assert unmarked_tests(ast.parse(module.format(""))) == (1, ["test_rounds"])
    assert unmarked_tests(ast.parse(module.format("@pytest.mark.soak\n"))) == (1, [])
