"""The last step of a job that a test watches: it waits while the file `hold` is in the folder of the job."""

from __future__ import annotations

import time
from pathlib import Path

import ckpt


def wait_before_last_step(folder: Path, step: int, steps: int) -> None:
    """Before the last step, wait until the test has removed the file `hold`; without the file, return at once.

    A job of short steps could end before a slow test has seen it running. The rank sends heartbeats meanwhile, so that
    `ckpt-run` takes it for no hang.
    """
    while step == steps - 1 and (folder / "hold").exists():
        with ckpt.pulse.phase("eval"):
            time.sleep(0.02)
