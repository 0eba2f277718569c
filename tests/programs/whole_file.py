"""Files that a test reads while a program writes them: they have their whole text at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step: a reader finds the old text, the new one, or no file."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text(text)
    made.replace(path)
