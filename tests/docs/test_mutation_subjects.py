"""The files and tests that `make mutation` names exist."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUBJECTS = runpy.run_path(str(ROOT / ".ci/mutation.py"))["SUBJECTS"]


def test_each_subject_has_files_and_tests() -> None:
    assert SUBJECTS
    for subject in SUBJECTS.values():
        assert subject.files
        assert all(importlib.util.find_spec(file.removesuffix(".py").replace("/", ".")) for file in subject.files)
        assert subject.tests
        assert all((ROOT / test).is_file() for test in subject.tests)
