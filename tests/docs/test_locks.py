"""Each lock says what it guards, and the code keeps to it (tests/helpers/lock_guards.py)."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers.lock_guards import faults_in

ROOT = Path(__file__).parents[2]
FILES = sorted(p for part in ("ckpt", "storage", "aggregator", "recovery", "tools") for p in (ROOT / part).rglob("*.py"))


def test_each_lock_says_what_it_guards_and_the_code_keeps_to_it():
    assert FILES
    assert [f"{file.relative_to(ROOT)}:{fault}" for file in FILES for fault in faults_in(file.read_text())] == []


COUNTER = """
    class Counter:
        def __init__(self):
            self._lock = threading.Lock()
            '''{text}'''
            self._count = 0
            self._names = []

        def add(self, name):
            with self._lock:
                self._count += 1
                self._append(name)

        def _append(self, name):
            '''Needs `_lock`.'''
            self._names.append(name)

        def count(self):
            return self._count
"""


@pytest.mark.parametrize(
    ("text", "more", "faults"),
    [
        ("Guards changes of `_count` and `_names`.", "", []),
        ("Guards `_names`. Guards changes of `_count`.", "", []),
        ("Guards `_names`, and changes of `_count`.", "", []),
        ("Guards `_count` and `_names`.", "", ["19: _count is used without _lock"]),
        ("Guards `_counts`.", "", ["4: _lock guards _counts, which does not exist"]),
        ("", "", ["4: the docstring of _lock does not begin with Guards or Taken"]),
        ("For the count.", "", ["4: the docstring of _lock does not begin with Guards or Taken"]),
        ("Guards changes of `_names`.", "self._names[0] = 1", ["22: _names is changed without _lock"]),
        ("Guards changes of `_names`.", "self._names.clear()", ["22: _names is changed without _lock"]),
        ("Guards changes of `_count`.", "self._count += 1", ["22: _count is changed without _lock"]),
        ("Guards changes of `_count`.", "print(self._count)", []),
        ("Taken while a name is written.", "self._append('a')", ["22: _append needs _lock"]),
    ],
)
def test_a_use_without_the_lock_is_found(text, more, faults):
    source = dedent(COUNTER.format(text=text))
    if more:
        source += f"\n    def more(self):\n        {more}\n"
    assert faults_in(source) == faults


def test_a_lock_of_a_module_is_checked_in_its_functions():
    source = dedent("""
        _lock = fork_safe_lock()
        '''Guards `_known`.'''
        _known = {}

        def add(name):
            with _lock:
                _known[name] = 1

        def get(name):
            return _known[name]
    """)
    assert faults_in(source) == ["11: _known is used without _lock"]


def test_a_lock_of_a_module_is_fork_safe():
    source = "_lock = threading.Lock()\n'Taken while a file is written.'\n"
    assert faults_in(source) == ["1: _lock is not made by fork_safe_lock"]
