"""Whether a FUSE file system can be mounted on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from helpers.processes import until


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


def wait_until_mounted(folder: Path, server: subprocess.Popen[bytes]) -> None:
    """Wait until a file system is mounted on a folder; fail if the process that serves it ends before."""

    def is_mounted() -> bool:
        assert server.poll() is None, f"the process that mounts {folder} has ended"
        return os.path.ismount(folder)

    until(is_mounted, f"a mount on {folder}")


def unmount(folder: Path) -> None:
    """Take a mount off a folder, also while files in it are open."""
    subprocess.run([shutil.which("fusermount3") or "fusermount", "-uz", str(folder)], check=False)
