"""Keras models, optimizers, metrics and seed generators on each backend: named by attributes, filled in place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "keras_state.py"
BACKENDS = ["tensorflow", "torch", "jax"]
CHECKS = [
    "names", "fills", "continues", "new_optimizer", "uncompiled", "other_structure", "unbuilt", "seeds", "preprocessing",
    "shared_and_nested", "low_precision", "random_state", "symbolic", "standalone_optimizer",
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.essential
def test_objects_of_keras_are_stored_and_filled(backend: str, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), backend, str(tmp_path), *CHECKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == CHECKS, done.stderr[-3000:]


@pytest.mark.parametrize(("saver", "loader"), [("tensorflow", "jax"), ("jax", "torch"), ("torch", "tensorflow")])
def test_a_model_of_one_backend_is_loaded_by_another(saver: str, loader: str, tmp_path: Path) -> None:
    found = []
    for backend, what in ((saver, "write"), (loader, "read")):
        command = [sys.executable, str(PROGRAM), backend, str(tmp_path), what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(done.stdout)
    assert found[0] == found[1] != ""
