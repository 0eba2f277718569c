"""The files and tests that `make mutation` names exist."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = runpy.run_path(str(ROOT / ".ci/mutation.py"))
SUBJECTS = PROGRAM["SUBJECTS"]


def test_each_subject_has_files_and_tests() -> None:
    assert SUBJECTS
    for subject in SUBJECTS.values():
        assert subject.files
        assert all(importlib.util.find_spec(file.removesuffix(".py").replace("/", ".")) for file in subject.files)
        assert subject.tests
        assert all((ROOT / test).is_file() for test in subject.tests)


def test_mutmut_cannot_signal_other_processes() -> None:
    command = PROGRAM["in_own_processes"]()
    if not command:
        pytest.skip("namespaces of processes are not permitted here")
    ran = subprocess.run([*command, "sh", "-c", "echo $$; ls /proc"], capture_output=True, text=True, check=True)
    numbers = [int(word) for word in ran.stdout.split() if word.isdecimal()]
    assert numbers[0] == 1
    assert max(numbers) < 10, "the command sees its own processes alone"
