"""An older commit of this project, installed in an environment of its own, with the packages of this environment."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from helpers.folders import TESTS

ROOT = TESTS.parent


def install(revision: str, folder: Path) -> Path:
    """Install a commit into `folder`, and return the folder of its commands. The checkout must have the whole history."""
    source, environment = folder / "source", folder / "environment"
    _run("git", "clone", "-q", "--no-checkout", str(ROOT), str(source))
    _run("git", "-C", str(source), "checkout", "-q", revision)
    venv.create(environment, symlinks=True)
    packages = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "shared.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    python = environment / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "-e", str(source))
    where = _run(str(python), "-I", "-c", "import ckpt; print(ckpt.__file__)")
    assert Path(where.strip()).is_relative_to(source), f"the environment has another ckpt: {where}"
    return environment / "bin"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
