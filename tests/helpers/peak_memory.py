"""The peak of the memory of a process, and by how much a command of ckpt raises it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from helpers.processes import finish, python

_MEASURED = """
import importlib, json, sys
from helpers.peak_memory import peak_bytes
tool, first, second, absent = json.loads(sys.argv[1])
command = importlib.import_module("ckpt.tools." + tool).command
command.main(first, standalone_mode=False)
before = peak_bytes()
command.main(second, standalone_mode=False)
assert absent not in sys.modules
print(peak_bytes() - before)
"""


def peak_bytes() -> int:
    """Return the most memory that this process has had since it started its program.

    The maximum that getrusage(2) returns begins with the memory of the process that started it.
    """
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def growth_of_command(tool: str, first: Sequence[object], second: Sequence[object], absent: str = "") -> int:
    """Run a tool of `ckpt.tools` twice in one process. Return by how many bytes the second run raises the peak of memory.

    first: arguments of a small run, which loads all modules.
    absent: a module that neither run may load.
    """
    given = json.dumps([tool, [*map(str, first)], [*map(str, second)], absent])
    return int(finish(python(_MEASURED, given), timeout=300).split()[-1])
