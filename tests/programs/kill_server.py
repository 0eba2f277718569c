"""Forks a saving child for each job it reads, a line of JSON each, and answers with the steps that the child acknowledged.

A forked child has numpy, pyarrow and ckpt imported already, so that a kill costs milliseconds and not half a second.
The server itself starts no thread before it forks.

Job: url, start, count, mode (blocking, async, checkpointer), failpoints, kill_after (seconds), keep, full_every (then the
states are drifting_state, else state_of). The seconds begin when the child reports that it is about to save.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from helpers.drifting_states import drifting_state
from helpers.preimport import import_all_of
from helpers.states import state_of, write_into

import ckpt
from ckpt.storage.base.failpoints import set_failpoints


def save_steps(job: dict[str, Any], acknowledge: Any) -> None:
    """The child: a training loop that changes its state in place as soon as a save has returned."""
    url, steps, mode = job["url"], range(job["start"], job["start"] + job["count"]), job["mode"]
    options = {"keep": job.get("keep", 2), "full_every": job.get("full_every")}
    state_at = state_of if options["full_every"] is None else drifting_state
    state = state_at(steps[0])
    if mode == "checkpointer":
        with ckpt.Checkpointer(url, every=1, in_flight=2, **options) as saver:
            handles = []
            for step in steps:
                state = write_into(state, state_at(step))
                handles.append(saver.save(step, state))
                while handles and (len(handles) > 1 or handles[0].done()):
                    acknowledge(handles.pop(0).result().step)
            for handle in handles:
                acknowledge(handle.result().step)
        return
    handle = None
    for step in steps:
        state = write_into(state, state_at(step))
        if mode == "blocking":
            acknowledge(ckpt.save(state, url, step, **options).step)
            continue
        if handle is not None:
            acknowledge(handle.result().step)
        handle = ckpt.save(state, url, step, blocking=False, **options)
    if handle is not None:
        acknowledge(handle.result().step)


def child(job: dict[str, Any], out: int) -> int:
    """Run a job in a forked child; return its exit status."""
    os.write(out, b"ready\n")
    set_failpoints(job.get("failpoints", ""))
    try:
        save_steps(job, lambda step: os.write(out, b"%d\n" % step))
    except Exception:
        os.write(out, json.dumps(traceback.format_exc()).encode() + b"\n")
        return 1
    return 0


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        status = 1
        try:
            status = child(job, writer)
        finally:
            os._exit(status)
    os.close(writer)
    data = b""
    deadline = None
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if wait == 0.0 or not select.select([reader], [], [], wait)[0]:
            os.kill(pid, signal.SIGKILL)
            deadline = None
            continue
        chunk = os.read(reader, 4096)
        if not chunk:
            break
        if not data and job.get("kill_after") is not None:
            deadline = time.monotonic() + job["kill_after"]
        data += chunk
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    lines = data.decode().splitlines()[1:]
    errors = [json.loads(line) for line in lines if line.startswith('"')]
    return {
        "acknowledged": [int(line) for line in lines if line.isdigit()],
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "error": "".join(errors),
    }


def save_in_all_modes(folder: Path) -> None:
    """Save a few steps in each mode."""
    for mode, full_every in (("blocking", 2), ("async", None), ("checkpointer", None)):
        save_steps({"url": str(folder / mode), "start": 0, "count": 3, "mode": mode, "full_every": full_every}, lambda _: None)


if __name__ == "__main__":
    import_all_of(save_in_all_modes)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
