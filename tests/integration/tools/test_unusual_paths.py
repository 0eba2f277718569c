"""The commands with unusual but legal names of files and leaves, and on terminals with other encodings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.restored_files import ENDINGS, run

import ckpt


@pytest.fixture(name="root")
def save_step(tmp_path: Path) -> Path:
    ckpt.save({"w": np.arange(4.0), "\u65e5": np.zeros(2)}, tmp_path / "run", step=3)
    return tmp_path / "run"


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_destination_may_have_a_name_of_the_greatest_length(ending: str, root: Path, tmp_path: Path) -> None:
    """File systems count bytes: 255."""
    length = (255 - len(f".{ending}")) // 3
    name = "\u65e5" * length + f".{ending}"
    (tmp_path / "out").mkdir()
    for options in ((), ("--overwrite",)):
        done = run(root, tmp_path / "out" / name, *options)
        assert done.returncode == 0, done.stderr
        assert os.listdir(tmp_path / "out") == [name]


def test_a_folder_without_a_name_is_refused_in_one_line(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "ckpt.tools.restore", str(root), ".", "--hf", "--overwrite"]
    done = subprocess.run(command, cwd=tmp_path / "empty", capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert done.stderr == "ckpt-restore: . can't be replaced, as it has no name here; name a file or a folder in it\n"


def test_a_link_to_a_folder_is_replaced_and_the_folder_stays(root: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "real").mkdir()
    (tmp_path / "out" / "link").symlink_to("real")
    done = run(root, tmp_path / "out" / "link", "--hf", "--only", "w", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "out")) == ["link", "real"]
    assert (tmp_path / "out" / "link" / "model.safetensors").exists()
    assert os.listdir(tmp_path / "out" / "real") == []


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_names_are_shown_where_the_terminal_lacks_their_characters(root: Path, tmp_path: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
    dest = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.npz")
    for command in (["inspect", str(root), "3"], ["restore", str(root), dest]):
        done = subprocess.run(
            [sys.executable, "-m", f"ckpt.tools.{command[0]}", *command[1:]], env=environment, capture_output=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if command[0] == "inspect":
            assert ("\u65e5".encode() if encoding != "latin-1" else b"\\u65e5") in done.stdout
    assert b"wrote " in done.stdout
    assert os.path.exists(dest)


@pytest.mark.parametrize("names", [("w", "w.npy"), ("__values__.npy",)])
def test_names_that_numpy_confuses_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    ckpt.save({name: np.full(2, number) for number, name in enumerate(names)}, tmp_path / "run", step=3)
    done = run(tmp_path / "run", tmp_path / "out.npz")
    assert done.returncode == 1
    other = names[-1].removesuffix(".npy")
    assert done.stderr == (
        f"ckpt-restore: numpy.load would return {other} for '{names[-1]}' of an npz file; choose another format\n"
    )
    assert run(tmp_path / "run", tmp_path / "out.safetensors").returncode == 0
