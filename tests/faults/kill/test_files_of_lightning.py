"""A kill while the file is written by which Lightning finds a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from helpers.processes import python

from ckpt.adapters.lightning_io import _read_file, _write_file

PROGRAM = """
import os, sys
from ckpt.adapters.lightning_io import _write_file

path, url = sys.argv[1:]
sys.addaudithook(lambda event, values: event == "os.rename" and values[1] == path and os._exit(9))
_write_file(path, url)
"""


def test_a_link_to_another_checkpoint_stays_until_the_new_file_has_its_name(tmp_path: Path) -> None:
    """Else `ckpt_path="last"` would find no file after a kill between the two, and the training would begin anew."""
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    _write_file(best, "/repository/best")
    os.symlink(best, last)
    process = python(PROGRAM, last, "/repository/last")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 9, errors
    assert last.is_symlink()
    assert _read_file(last) == "/repository/best"
    _write_file(last, "/repository/last")
    assert not last.is_symlink()
    assert _read_file(last) == "/repository/last"
    assert _read_file(best) == "/repository/best"
