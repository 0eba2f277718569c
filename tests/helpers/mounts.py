"""Whether a FUSE file system can be mounted on this machine."""

from __future__ import annotations

import os
import shutil


def why_no_fuse() -> str | None:
    """Return why no FUSE file system can be mounted, or None."""
    if not os.path.exists("/dev/fuse") or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse that this user may open"
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        return "no fusermount: install fuse3"
    try:
        import fuse  # noqa: F401
    except (ImportError, OSError) as error:
        return f"no libfuse: {error}"
    return None
