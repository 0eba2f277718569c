"""`python rank_server.py`: imports torch once, then forks the ranks of each launch that it reads, as torchrun would start them.

A launch is a line of JSON: program, arguments, environment, size, output and errors (files; "." and the rank are appended), and
end_others: whether the other ranks are ended after one fails. The answer is a line with the exit status of each rank, negative
for a signal. ckpt is not imported before the fork, so each rank imports it with an environment of its own.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
import types
from typing import Any

import numpy as np
import torch._dynamo  # the first optimizer of a process imports it, which takes as long as the rest of torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

SECONDS = 300
"""Ranks that run for longer are killed."""


def start_store() -> tuple[int, int]:
    """Fork the process with the store at which the ranks of a launch meet; return its number and its port."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write_end, str(store.port).encode())
        while True:
            signal.pause()
    os.close(write_end)
    port = int(os.read(read_end, 16))
    os.close(read_end)
    return pid, port


def become_rank(job: dict[str, Any], rank: int, port: int) -> None:
    """Give this process the environment, the arguments and the output of a rank."""
    os.setsid()
    for descriptor, path in ((1, job["output"]), (2, job["errors"])):
        file = os.open(f"{path}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    size = str(job["size"])
    os.environ.clear()
    os.environ.update(job["environment"])
    os.environ.update({
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    })  # fmt: skip
    np.random.seed(None)  # otherwise all ranks would have the numbers of the server
    faulthandler.enable()
    sys.argv = [job["program"], *job["arguments"]]
    sys.path[0] = os.path.dirname(job["program"])


def run_program(path: str) -> None:
    """Run a program as the interpreter would: as the module `__main__`."""
    with open(path) as file:
        code = compile(file.read(), path, "exec")
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def wait_for(ranks: dict[int, int], end_others: bool) -> list[int]:
    """Wait for these ranks, a mapping of processes to ranks; return their exit statuses.

    end_others: whether the others are ended after one fails.
    """
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + SECONDS
    while len(statuses) < len(ranks):
        for pid in ranks.keys() - statuses.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        failed = end_others and any(statuses.values())
        if failed and deadline > time.monotonic() + 10:
            deadline = time.monotonic() + 10
            for pid in ranks.keys() - statuses.keys():
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            for pid in ranks.keys() - statuses.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[pid] for pid in ranks]


def main() -> None:
    """Serve launches until the input ends. In each rank, run its program and return."""
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        store, port = start_store()
        ranks: dict[int, int] = {}
        for rank in range(job["size"]):
            pid = os.fork()
            if pid == 0:
                become_rank(job, rank, port)
                run_program(job["program"])
                return
            ranks[pid] = rank
        statuses = wait_for(ranks, job["end_others"])
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
