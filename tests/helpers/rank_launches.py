"""A program that the launcher of a framework starts as two ranks, which save and load together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ckpt

OTHER_LAUNCHERS = re.compile(r"RANK|WORLD_SIZE|PADDLE_|MS_|PMI|SLURM_")


def assert_two_ranks_save_and_load(
    launcher: Sequence[str], source: str, mode: str, folder: Path, logs: str, group_name: str
) -> None:
    """Launch a program with the URL of a repository and a mode; check that two ranks have saved one step and loaded it.

    source: the code of the program. Each rank saves step 1, loads it, and prints "loaded by" and its group.
    logs: the pattern of the files in `folder` to which the launcher writes what the ranks print.
    group_name: the start of what they print of the group.
    """
    program = folder / "program.py"
    program.write_text(source)
    environment = {name: value for name, value in os.environ.items() if not OTHER_LAUNCHERS.match(name)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        [*launcher, str(program), str(folder / "run"), mode],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    printed = "".join(file.read_text() for file in sorted(folder.glob(logs)))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + printed[-4000:]
    assert sorted(re.findall(r"loaded by .*(rank \d of 2)", printed))[-2:] == ["rank 0 of 2", "rank 1 of 2"]
    assert f"loaded by {group_name}" in printed
    assert ckpt.open(folder / "run")[1].commit.world_size == 2
