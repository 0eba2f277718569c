"""`python fork_server.py MODULE…`: imports modules, then forks a child for each job it reads, and answers with its exit status.

A job is a line of JSON: code, arguments, failpoints. A child starts in milliseconds, because it imports nothing again.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from ckpt.storage.base.failpoints import set_failpoints


def run_child(job: dict[str, Any]) -> int:
    """Run the code of a job in this process, and return the exit status."""
    sys.argv = ["-c", *job["arguments"]]
    set_failpoints(job["failpoints"])
    try:
        exec(compile(job["code"], "<job>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def serve(job: dict[str, Any]) -> int:
    """Fork a child for a job, wait for it, and return its exit status; a negative one is the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.dup2(2, 1)  # the output belongs to the answers
            status = run_child(job)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        print(serve(json.loads(line)), flush=True)
