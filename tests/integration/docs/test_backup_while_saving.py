"""The commands of the page on backups copy complete steps while a job saves."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import ckpt

PAGE = Path(__file__).parents[3] / "docs/operations/backup.md"


def copy_commands() -> list[str]:
    """Return the shell commands that copy the folder `run` to the folder `copy`."""
    section = PAGE.read_text().partition("## A copy of the files")[2].partition("\n## ")[0]
    commands = re.findall(r"^\$ (.*)$", section, re.MULTILINE)
    return [command for command in commands if not command.startswith("ckpt-inspect")]


COMMANDS = copy_commands()


@pytest.mark.parametrize("gap", range(len(COMMANDS) + 1))
def test_a_step_that_is_committed_during_a_copy_leaves_no_incomplete_step_in_it(tmp_path: Path, gap: int) -> None:
    def save(step: int) -> None:
        ckpt.save({"w": np.full(10_000, step)}, tmp_path / "run", step=step)

    save(1)
    for number, command in enumerate(COMMANDS):
        if number == gap:
            save(2)
        subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=300)

    copy = ckpt.open(tmp_path / "copy")
    assert copy.steps()[0] == 1
    for step in copy.steps():
        assert (ckpt.load(tmp_path / "copy", step=step)["w"] == step).all()


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 3
