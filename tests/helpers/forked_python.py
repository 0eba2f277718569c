"""Python processes that start in milliseconds: children that a process forks which has the imports already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from helpers.folders import PROGRAMS
from helpers.processes import python_path


class ForkedPython:
    """Runs code in children of programs/fork_server.py. modules: what the server imports once."""

    def __init__(self, *modules: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "fork_server.py"), *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip

    def __enter__(self) -> ForkedPython:
        return self

    def run(self, code: str, *arguments: str | Path, failpoints: str = "") -> int:
        """Run code with sys.argv[1:] = arguments and these fail points; return its exit status, negative for a signal."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        job = {"code": code, "arguments": [str(argument) for argument in arguments], "failpoints": failpoints}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.communicate(timeout=600)
