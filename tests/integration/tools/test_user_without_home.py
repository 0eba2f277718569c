"""A user without a home folder, as in a container that runs with any user id, can use the commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

_AS_UNKNOWN_USER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(28, 4, 0, 0, 0)  # PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP: it may still read the interpreter of root
os.setuid(54321)  # a number without an entry in /etc/passwd
from ckpt.tools.inspect import main
main()
"""


@pytest.fixture(name="root")
def save_step(tmp_path: Path) -> Path:
    ckpt.save({"w": np.arange(4.0)}, tmp_path / "run", step=3)
    return tmp_path / "run"


def inspect(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    names = ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "CKPT_CONFIG")
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    return subprocess.run(
        [sys.executable, "-c", _AS_UNKNOWN_USER, *map(str, arguments)], env=environment, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip


def test_a_part_of_the_blocks_is_verified(root: Path) -> None:
    done = inspect(root, "--verify", "--subset", "100%")
    assert done.returncode == 0, done.stderr
    assert "read and checked, in 1 of 1 block" in done.stdout
    assert done.stderr == (
        "ckpt-inspect: can't write the position (this user has no home folder), so the next run begins at a random block; "
        "name a writable folder in XDG_STATE_HOME\n"
    )


@pytest.mark.parametrize("variables", [{}, {"CKPT_CONFIG": "~nobody-has-this-name/config.toml"}])
def test_a_namespace_that_no_file_describes_is_refused_in_one_line(variables: dict[str, str]) -> None:
    done = inspect("ckpt://lab/run", **variables)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "config.toml" in done.stderr


@pytest.mark.parametrize("variable", ["CKPT_TOKEN_FILE", "CKPT_CA_FILE"])
def test_a_file_below_the_home_of_an_unknown_user_is_named(variable: str) -> None:
    done = inspect("ckpt://127.0.0.1:1/run", **{variable: "~nobody-has-this-name/file"})
    assert done.returncode == 1
    assert f"{variable} ~nobody-has-this-name/file can't be read" in done.stderr
    assert "Traceback" not in done.stderr
