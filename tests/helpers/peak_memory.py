"""By how much a command of ckpt raises the peak of the memory of its process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_MEASURED = """
import importlib, json, sys
from pathlib import Path
tool, first, second, absent = json.loads(sys.argv[1])
command = importlib.import_module("ckpt.tools." + tool).command
peak = lambda: int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
command.main(first, standalone_mode=False)
before = peak()
command.main(second, standalone_mode=False)
assert absent not in sys.modules
print(peak() - before)
"""


def growth_of_command(tool: str, first: Sequence[object], second: Sequence[object], absent: str = "") -> int:
    """Run a tool of `ckpt.tools` twice in one process. Return by how many bytes the second run raises the peak of memory.

    first: arguments of a small run, which loads all modules.
    absent: a module that neither run may load.
    """
    given = json.dumps([tool, [*map(str, first)], [*map(str, second)], absent])
    done = subprocess.run([sys.executable, "-c", _MEASURED, given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])
