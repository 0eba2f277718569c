"""The rules for the path of a file in a namespace."""

from __future__ import annotations

from ckpt.storage.base.errors import InvalidName

PATH_BYTES = 1024


def check_path(path: str) -> str:
    """Return `path` if it can name a file: segments joined by '/', none of them empty, '.' or '..'. Raises InvalidName."""
    segments = path.split("/")
    if (
        len(path.encode("utf-8", "replace")) > PATH_BYTES
        or any(s in ("", ".", "..") or len(s.encode("utf-8", "replace")) > 255 for s in segments)
        or any(ord(c) < 32 or c == "\x7f" or 0xD800 <= ord(c) < 0xE000 for c in path)
    ):
        raise InvalidName(
            f"{path[:200]!r} can't name a file: use segments of at most 255 bytes without control characters, joined by '/', "
            f"{PATH_BYTES} bytes in all, and no '.' or '..'"
        )
    return path
