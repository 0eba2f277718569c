"""Records what programs do to files, and checks the states in which a power loss may leave these files.

The programs run on a mount that records (`programs/recording_mount.py`). So operations of C libraries such as SQLite and of
several processes are recorded, too. `crash_states.py` rebuilds the states.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers.campaigns import CountCases
from helpers.crash_states import CrashState, crash_states, read_recording
from helpers.folders import PROGRAMS, temporary_folder
from helpers.mounts import unmount, wait_until_mounted
from helpers.processes import SOAK, python_path

AMOUNT = (50, 1.0) if SOAK else (1, 0.3)
"""Random states for each moment, and the share of the moments."""

_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True)
class Recording:
    """A mount that records, and its log."""

    mount: Path
    log: Path

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a process that works on the mount, with SQLite files in it."""
        return os.environ | {"PYTHONPATH": python_path(), "CKPT_LOCAL_FILE_SYSTEMS": str(self.mount)} | variables

    def run(self, program: str, *arguments: str, **variables: str) -> None:
        """Run a program with the mount and these arguments, until it ends."""
        command = [sys.executable, "-c", program, str(self.mount), *arguments]
        subprocess.run(command, env=self.environment(**variables), check=True, timeout=600)


@contextmanager
def recording_mount(folder: Path) -> Iterator[Recording]:
    """Mount an empty folder that records until the end of the context."""
    below, mount, log = folder / "below", folder / "mount", folder / "log"
    below.mkdir()
    mount.mkdir()
    server = subprocess.Popen([sys.executable, str(PROGRAMS / "recording_mount.py"), str(below), str(mount), str(log)])
    try:
        wait_until_mounted(mount, server)
        yield Recording(mount, log)
    finally:
        unmount(mount)
        server.wait(600)


def record(folder: Path, program: str, left_out: str = "nothing", **variables: str) -> Path:
    """Run a program on a recording mount, and return the log. left_out: the function that makes nothing durable in it."""
    with recording_mount(folder) as recording:
        recording.run(program, left_out, **variables)
    return recording.log


def acknowledge(mount: str | Path, name: object) -> None:
    """Record that a program considers something durable from now on."""
    os.path.exists(f"{mount}/.ack-{name}")


def first_wrong(
    log: Path, wrong_in: Callable[[CrashState, Path], str | None], samples: int, share: float = 1.0,
    count_cases: CountCases = lambda count: None,
) -> str | None:  # fmt: skip
    """Return what is wrong in the first wrong state of a recording, with the changes that led to it.

    samples, share: see `crash_states`.
    count_cases: gets the number of states.
    """
    seed = int(os.environ.get("CKPT_SEED") or random.randrange(1 << 32))
    print(f"CKPT_SEED={seed}")
    changes, count = read_recording(log), 0
    for state in crash_states(changes, random.Random(seed), samples, share):
        count += 1
        with temporary_folder("ckpt-crash-", _MEMORY) as folder:
            state.write_to(folder)
            if (wrong := wrong_in(state, folder)) is not None:
                return f"CKPT_SEED={seed}: {wrong}; {state.acknowledged} were acknowledged, {state.where}"
    assert count > 100 * share, "the recording has too few changes"
    count_cases(count)
    print(f"{count} states of {len(changes)} changes")
    return None
