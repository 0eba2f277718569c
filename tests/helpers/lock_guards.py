"""Checks what the docstrings of locks say: which attributes a lock guards, and that they are used only while it is held.

A docstring follows each lock. "Guards `a` and `b`." allows uses of these attributes only in a block `with lock:`, in
`__init__`, and in methods whose docstring says "Needs `lock`.". Those are called only in such places, too. "Guards changes of
`a`." allows reads everywhere. A docstring of a lock that guards no attribute begins with "Taken".

A lock of a module is made by `fork_safe_lock` or `fork_safe_rlock`: a thread that holds it does not exist in a forked child.
A function whose docstring begins with "In a forked child:" runs there before any other thread exists, and needs no lock.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

FORK_SAFE = {"fork_safe_lock", "fork_safe_rlock"}
LOCKS = {"threading.Lock", "threading.RLock", "threading.Condition", "Lock", "RLock", "Condition", *FORK_SAFE}
CHANGING_CALLS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove", "setdefault",
    "sort", "update",
}  # fmt: skip


@dataclass(frozen=True)
class Lock:
    """A lock of a class, or of a module."""

    name: str
    line: int
    text: str
    """Its docstring; empty if it has none."""
    is_fork_safe: bool
    guarded: frozenset[str]
    """The names that may be used only while the lock is held."""
    guarded_changes: frozenset[str]
    """The names that may be changed only while the lock is held."""


def faults_in(source: str) -> list[str]:
    """Return the line and the reason of each place that contradicts the docstring of a lock, or of a lock that has none."""
    tree = ast.parse(source)
    faults = list(_faults_of_scope(tree, is_module=True))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            faults += _faults_of_scope(node, is_module=False)
    return faults


def _faults_of_scope(scope: ast.Module | ast.ClassDef, *, is_module: bool) -> Iterator[str]:
    locks = {lock.name: lock for lock in _locks_of(scope, is_module)}
    if not locks:
        return
    names = _names_of(scope, is_module)
    for lock in locks.values():
        if not lock.text.startswith(("Guards", "Taken")):
            yield f"{lock.line}: the docstring of {lock.name} does not begin with Guards or Taken"
        if is_module and not lock.is_fork_safe:
            yield f"{lock.line}: {lock.name} is not made by fork_safe_lock"
        for name in sorted((lock.guarded | lock.guarded_changes) - names):
            yield f"{lock.line}: {lock.name} guards {name}, which does not exist"
    functions = [node for node in scope.body if isinstance(node, ast.FunctionDef)]
    needed = {f.name: set(re.findall(r"Needs `(\w+)`", ast.get_docstring(f) or "")) & set(locks) for f in functions}
    for function in functions:
        if function.name != "__init__" and not (ast.get_docstring(function) or "").startswith("In a forked child:"):
            visitor = _Uses(locks, needed, is_module, set(needed[function.name]))
            visitor.visit(function)
            yield from visitor.faults


class _Uses(ast.NodeVisitor):
    """Finds uses of guarded names where their lock is not held."""

    def __init__(self, locks: dict[str, Lock], needed: dict[str, set[str]], is_module: bool, held: set[str]) -> None:
        self.faults: list[str] = []
        self._locks, self._needed, self._is_module, self._held = locks, needed, is_module, held

    def visit_With(self, node: ast.With) -> None:
        before, names = set(self._held), [_name_of(item.context_expr, self._is_module) for item in node.items]
        for item in node.items:
            self.visit(item)
        self._held |= {name for name in names if name in self._locks}
        for statement in node.body:
            self.visit(statement)
        self._held = before

    def visit(self, node: ast.AST) -> None:
        name = _name_of(node, self._is_module)
        if name is not None:
            self._check(name, node, is_change=isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)))
            for missing in self._needed.get(name, set()) - self._held:
                self.faults.append(f"{_line(node)}: {name} needs {missing}")
        changed = _changed_part(node)
        if changed is not None and (name := _name_of(changed, self._is_module)) is not None:
            self._check(name, node, is_change=True)
        super().visit(node)

    def _check(self, name: str, node: ast.AST, *, is_change: bool) -> None:
        for lock in self._locks.values():
            if lock.name in self._held:
                continue
            if name in lock.guarded or (is_change and name in lock.guarded_changes):
                self.faults.append(f"{_line(node)}: {name} is {'changed' if is_change else 'used'} without {lock.name}")


def _changed_part(node: ast.AST) -> ast.AST | None:
    """Return the container that a node changes: of `x[i] = …`, `del x[i]`, `x.append(…)`; None for other nodes."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING_CALLS:
        return node.func.value
    return None


def _locks_of(scope: ast.Module | ast.ClassDef, is_module: bool) -> Iterator[Lock]:
    bodies = [scope.body] if is_module else [f.body for f in scope.body if isinstance(f, ast.FunctionDef)]
    for body in bodies:
        for number, statement in enumerate(body):
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not isinstance(statement.value, ast.Call):
                continue
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            name = _name_of(target, is_module)
            kind = ast.unparse(statement.value.func)
            if name is None or kind not in LOCKS:
                continue
            following = body[number + 1] if number + 1 < len(body) else None
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = " ".join(str(following.value.value).split())
            guarded, guarded_changes = _listed(text, "Guards "), _listed(text, "Guards changes of ")
            yield Lock(name, statement.lineno, text, kind in FORK_SAFE, guarded, guarded_changes)


def _listed(text: str, begin: str) -> frozenset[str]:
    """Return the names in backquotes in the sentences that begin so, up to the first further clause."""
    found: set[str] = set()
    for sentence in re.split(r"(?<=\.) ", text):
        if match := re.match(re.escape(begin) + r"((?:`\w+`(?:, and | and |, )?)+)", sentence):
            found |= set(re.findall(r"`(\w+)`", match.group(1)))
    return frozenset(found)


def _names_of(scope: ast.AST, is_module: bool) -> set[str]:
    return {name for node in ast.walk(scope) if (name := _name_of(node, is_module)) is not None}


def _name_of(node: ast.AST, is_module: bool) -> str | None:
    """Return the name of `self.name` in a class, or of `name` in a module."""
    if is_module:
        return node.id if isinstance(node, ast.Name) else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        return node.attr
    return None


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)
