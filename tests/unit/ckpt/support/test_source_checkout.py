"""In a source checkout without an editable install, the error of `import ckpt` says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, timeout=600)


@pytest.mark.parametrize("arguments", [("-c", "import ckpt"), ("-m", "ckpt.tools.inspect", "--version")])
def test_a_checkout_that_is_not_installed_is_named_with_what_to_do(arguments: tuple[str, ...]) -> None:
    """With -S, Python does not know the editable install of the tests."""
    refused = run(ROOT, "-S", *arguments)
    assert refused.returncode == 1
    assert f"ckpt from the source files in {ROOT}" in refused.stderr
    assert "run Python in another folder" in refused.stderr


def test_an_editable_install_works_in_its_checkout() -> None:
    assert run(ROOT, "-c", "import ckpt; ckpt.save").stderr == ""
