"""Forks a process for each job: a writer that stops in the middle of its commit, or one that takes the repository over.

A job is a line of JSON: url, role ("old" or "new"), saves ([step, variant] …). The old one stops itself in the last save: at
a check of its lease (stop_after counts them), or before a call to the file system (stop_at_call counts them). The answer is
its process id; `Server.result` waits for the result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from helpers.preimport import import_all_of
from helpers.processes import python_path
from helpers.states import state_of


def state(step: int, variant: int) -> dict[str, Any]:
    """Return the state of a step, which differs for each variant."""
    return state_of(10 * step + variant, size=500)


def variant_of(loaded: dict[str, Any]) -> tuple[int, int]:
    """Return step and variant of a loaded state."""
    return divmod(loaded["step"], 10)


def _stop_after(looks: int) -> None:
    from ckpt.repository.writer_lease import WriterLease

    check, seen = WriterLease.require_newest, [0]

    def counted(self: WriterLease) -> None:
        check(self)
        seen[0] += 1
        if seen[0] == looks:
            os.kill(os.getpid(), signal.SIGSTOP)

    WriterLease.require_newest = counted  # type: ignore[method-assign]


_CALLS = (
    "open", "link", "rename", "replace", "unlink", "fsync", "fdatasync", "listdir", "scandir", "mkdir", "remove", "rmdir",
    "stat", "lstat",
)  # fmt: skip


def _stop_at_call(number: int) -> None:
    seen = [0]

    def counting(call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGSTOP)
            return call(*args, **kwargs)

        return counted

    for name in _CALLS:
        setattr(os, name, counting(getattr(os, name)))


def _work(job: dict[str, Any]) -> str:
    import ckpt
    from ckpt.groups import process_identity

    if job["role"] == "new":  # as in another container, from which the processes of this one are invisible
        process_identity._pid_namespace = lambda: "pid:[another]"
    try:
        with ckpt.Checkpointer(job["url"]) as saver:
            *before, last = job["saves"] or [None]
            for step, variant in before:
                saver.save(step, state(step, variant), blocking=True)
            if "stop_after" in job:
                _stop_after(job["stop_after"])
            if "stop_at_call" in job:
                _stop_at_call(job["stop_at_call"])
            if last is not None:
                saver.save(last[0], state(*last), blocking=True)
        return "saved"
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"


def _serve() -> None:
    import ckpt.aggregator.interfaces.store
    import ckpt.storage.remote.object_store  # noqa: F401

    import_all_of(lambda folder: print(_work({"url": str(folder / "run"), "role": "new", "saves": [[0, 0], [1, 1]]})))
    for line in sys.stdin:
        job = json.loads(line)
        if (pid := os.fork()) == 0:
            status = 1
            try:
                outcome = _work(job)
                Path(job["answer"]).write_text(outcome)
                status = 0
            finally:
                os._exit(status)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(status, flush=True)


class Server:
    """A process that runs jobs one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip

    def begin(self, **job: Any) -> int:
        """Start a job, and return the number of its process."""
        self._count += 1
        self._answer = self._folder / f"{id(self)}-{self._count}"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**job, "answer": str(self._answer)}) + "\n")
        self._process.stdin.flush()
        self.pid = int(self._process.stdout.readline())
        return self.pid

    def stands_still(self) -> bool:
        """Wait until the process of the job has stopped itself; return False where it has ended before."""
        while True:
            try:
                state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                return False
            if state == "T":
                return True
            time.sleep(0.01)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def result(self) -> str:
        """Return the result of the job."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "0\n"
        return self._answer.read_text()

    def run(self, **job: Any) -> str:
        self.begin(**job)
        return self.result()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(600)


if __name__ == "__main__":
    _serve()
