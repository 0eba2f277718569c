"""PyPI's package `ckpt` is another project: whichever of the two is installed last, the user learns what happened."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OTHER_FILES = ("__init__", "config", "decorator", "main", "run", "task")  # of version 0.2.3


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder in which this package is installed."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(tmp_path / "site"),
    ]
    shutil.copytree(ROOT, tmp_path / "source", ignore=lambda folder, names: _not_needed(folder, names))
    left = tmp_path / "source/build/lib/ckpt/removed_module.py"  # of an earlier build of the same checkout
    left.parent.mkdir(parents=True)
    left.touch()
    done = subprocess.run([*pip, str(tmp_path / "source")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return tmp_path / "site"


def _not_needed(folder: str, names: list[str]) -> list[str]:
    kept = {"ckpt", "storage", "aggregator", "recovery", "tools", "pyproject.toml", "setup.py", "README.md", "LICENSE"}
    return [n for n in names if n not in kept] if Path(folder) == ROOT else [n for n in names if n == "__pycache__"]


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return the result of Python with this folder in front of all others on its path."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=site.parent, timeout=600
    )


def test_modules_that_were_removed_from_a_checkout_are_not_installed_again(site: Path) -> None:
    assert (site / "ckpt" / "api.py").exists()
    assert not (site / "ckpt" / "removed_module.py").exists()


def test_both_in_one_folder(site: Path) -> None:
    ours = (site / "ckpt" / "__init__.py").read_text()
    fine = run(site, "-c", "import ckpt; print(ckpt.save)")
    assert fine.returncode == 0
    assert fine.stderr == ""
    for name in OTHER_FILES:  # the other one is installed after this one
        (site / "ckpt" / f"{name}.py").write_text("__version__ = '0.2.3'\n")
    replaced = run(site, "-m", "ckpt.tools.inspect", "--help")
    assert replaced.returncode == 1
    assert "is not ckpt-store" in replaced.stderr
    assert "pip uninstall ckpt" in replaced.stderr

    (site / "ckpt" / "__init__.py").write_text(ours)  # this one is installed after the other
    works = run(site, "-c", "import ckpt; print(ckpt.save)")
    assert works.returncode == 0
    assert f"{site} has PyPI's package" in works.stderr
    assert "pip uninstall ckpt" in works.stderr

    for name in OTHER_FILES:  # the other one is uninstalled: it takes the common file with it
        (site / "ckpt" / f"{name}.py").unlink()
    left = run(site, "-m", "ckpt.tools.inspect", "--help")
    assert left.returncode == 1
    assert "is not ckpt-store" in left.stderr


def test_the_other_in_a_folder_of_its_own(site: Path, tmp_path: Path) -> None:
    """This one is imported, and the other is hidden."""
    (tmp_path / "other" / "ckpt").mkdir(parents=True)
    (tmp_path / "other" / "ckpt" / "decorator.py").touch()
    hidden = run(site, "-c", f"import sys; sys.path.append({str(tmp_path / 'other')!r}); import ckpt")
    assert hidden.returncode == 0
    assert f"{tmp_path / 'other'} has PyPI's package" in hidden.stderr


def test_a_folder_of_checkpoints_with_the_name_of_the_module_hides_nothing(site: Path) -> None:
    """Unlike an editable install, an installed package is found before a folder `ckpt` without an `__init__.py`."""
    (site.parent / "ckpt").mkdir()
    imported = run(site, "-c", "import ckpt; print(ckpt.save)")
    assert imported.returncode == 0, imported.stderr
    assert imported.stderr == ""
