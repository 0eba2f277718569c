"""Whether a path is a folder or a file. Unlike os.path, an error of the file system is raised and does not mean no."""

from __future__ import annotations

import os
import stat


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder. Raises OSError if that can't be determined now."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a regular file. Raises OSError if that can't be determined now."""
    return stat.S_ISREG(_mode(path))


def _mode(path: str | os.PathLike[str]) -> int:
    """Return the mode of what is at a path; 0 if nothing is."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no name of a file has a zero byte
        return 0
