"""The measured memory of a process is its own, also where the process that starts it has much more."""

from __future__ import annotations

import re

from helpers.processes import TESTS, finish, python

MIB = 1 << 20

CHILD = """
from helpers.peak_memory import peak_bytes
before = peak_bytes()
memory = bytearray(b"1") * (64 << 20)
del memory
print(before, peak_bytes() - before)
"""
PARENT = f"""
from helpers.processes import finish, python
memory = bytearray(b"1") * (512 << 20)
print(finish(python({CHILD!r})))
"""


def test_the_peak_of_a_process_leaves_out_that_of_its_parent() -> None:
    before, growth = map(int, finish(python(PARENT)).split())
    assert before < 512 * MIB
    assert 60 * MIB < growth < 80 * MIB


def test_no_test_measures_memory_by_getrusage() -> None:
    files = [file for file in TESTS.rglob("*.py") if re.search(r"\bru_" + "maxrss", file.read_text())]
    assert files == []
