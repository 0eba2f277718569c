"""Whether a file system can be mounted with FUSE here."""

from __future__ import annotations

import os
import shutil


def no_fuse() -> str | None:
    """Why nothing can be mounted here, if so."""
    if not os.path.exists("/dev/fuse") or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse that this user may open"
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        return "no fusermount: install fuse3"
    try:
        import fuse  # noqa: F401
    except (ImportError, OSError) as error:
        return f"no libfuse: {error}"
    return None
