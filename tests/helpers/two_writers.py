"""Two writers on one repository."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ckpt.format import json_records
from ckpt.groups.process_identity import ProcessIdentity, this_process

HOLDER_PROGRAM = """
import sys, ckpt
from helpers.states import state_of
saver = ckpt.Checkpointer(sys.argv[1])
saver.save(0, state_of(0), blocking=True)
print("holding", flush=True)
sys.stdin.readline()
saver.save(1, state_of(1), blocking=True)
saver.close()
"""


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended and was not waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def take_over(root: Path, generation: int) -> ProcessIdentity:
    """Write the writer lease of another host that takes the repository over, and return its owner."""
    owner = dataclasses.replace(this_process(), host="elsewhere", boot="b", pid=4711)
    data = json_records.encode("generation", {"owner": dataclasses.asdict(owner)})
    (root / f"generations/{generation:08d}.json").write_bytes(data)
    return owner
