"""ckpt-import of a source: what it stores, what a killed one leaves, and how much memory it needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ckpt
from ckpt.tools.import_step import command
from helpers.peak_memory import growth_of_command

IMPORT = [sys.executable, "-m", "ckpt.tools.import_step"]


def load_imported(source: Path | str, *options: object, to: Path | None = None) -> Any:
    """Import a source, and return the loaded state. to: the repository; by default the folder `imported` next to the source."""
    url = to or Path(source).parent / "imported"
    assert command.main([str(source), str(url), *map(str, options)], standalone_mode=False) == 0
    return ckpt.load(url)


def assert_killed_import_leaves_no_step(source: Path, failpoint: str = "save.manifest") -> None:
    """Kill an import at a fail point; check that it has stored no step, and that the next import stores one."""
    url = source.parent / "imported"
    arguments = [*IMPORT, str(source), str(url)]
    killed = subprocess.run(arguments, env={**os.environ, "CKPT_FAILPOINTS": f"{failpoint}=kill"}, timeout=600)
    assert killed.returncode == -signal.SIGKILL
    assert ckpt.open(url).steps() == []
    assert subprocess.run(arguments, timeout=600).returncode == 0
    assert ckpt.open(url).steps() == [0]


def growth_of_memory(small: Path, big: Path, folder: Path, absent: str = "") -> int:
    """Import a small source, which loads all modules, to `folder`/one, and then a big one to `folder`/two.

    absent: a module that no import may load. Returns by how many bytes the second import raises the peak of the process.
    """
    return growth_of_command("import_step", [small, folder / "one"], [big, folder / "two"], absent)


def assert_same_tensors(found: Any, expected: Any) -> None:
    """Check that two states with tensors of torch are equal, with their types, and bit for bit."""
    import torch

    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.requires_grad == expected.requires_grad
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
        assert torch.equal(*raw)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same_tensors(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_tensors(one, other)
    else:
        assert found == expected
