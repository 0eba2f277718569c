"""The function open_store, which returns the store of a URL. A plain path is a local directory."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from ckpt.storage.base.errors import UnknownScheme
from ckpt.storage.base.store import Store

OBJECT_SCHEMES = {"s3", "s3a", "gs", "az", "abfs", "abfss", "adl", "azure"}


def open_store(url: str | os.PathLike[str]) -> Store:
    """Return the store of a URL. Nothing is read or written yet. Raises UnknownScheme for a URL that names no store."""
    text = os.fspath(url)
    scheme, separator, _ = text.partition("://")
    if not separator:
        from ckpt.storage.local.directory import LocalStore

        return LocalStore(text)
    if not scheme:
        raise UnknownScheme(f"{text}: a URL begins with a scheme; use a path, file://, s3:// …")
    if scheme in ("file", "local"):
        from ckpt.storage.local.directory import LocalStore

        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise UnknownScheme(f"{text}: a file URL names a path on this machine; write file:///path")
        return LocalStore(unquote(parts.path))
    if scheme in OBJECT_SCHEMES:
        from ckpt.storage.remote.object_store import ObjectStore

        return ObjectStore(text)
    from ckpt.storage.remote.fsspec_store import FsspecStore

    return FsspecStore(text)
