"""The space of an upload is promised to others only after the upload has ended, however it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage.base.errors import NoSpace
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.node.upload_leases import UploadLeases

CAPACITY, NBYTES = 10_000_000, 8_000_000


class SlowWriter:
    """A writer whose file takes a while to be removed or made durable, as on a slow disk."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.began, self.may_end = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.began.set()
        assert self.may_end.wait(60)
        self._writer.abort()

    def commit(self, length: int | None) -> int:
        self.began.set()
        assert self.may_end.wait(60)
        return int(self._writer.commit(length))


ENDS: dict[str, Callable[[UploadLeases, str], object]] = {
    "expired": lambda uploads, key: uploads.expire(),
    "aborted": lambda uploads, key: uploads.abort(key),
    "committed": lambda uploads, key: uploads.commit(key),
    "drained": lambda uploads, key: uploads.drain(0),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_space_of_an_upload_stays_reserved_until_it_has_ended(tmp_path: Path, end: str) -> None:
    uploads = UploadLeases(
        LocalStore(tmp_path), lambda promised: CAPACITY - promised, lease_seconds=-1.0 if end == "expired" else 60.0
    )
    key = uploads.create("a", NBYTES)
    writer = uploads._uploads[key].writer = SlowWriter(uploads._uploads[key].writer)  # type: ignore[assignment]
    thread = threading.Thread(target=ENDS[end], args=(uploads, key))
    thread.start()
    assert writer.began.wait(60)
    assert uploads._free_bytes() == CAPACITY - NBYTES
    if end != "drained":  # a node that ends accepts nothing new
        with pytest.raises(NoSpace):
            uploads.create("b", NBYTES)
    writer.may_end.set()
    thread.join(60)
    assert uploads._free_bytes() == CAPACITY
    if end != "drained":
        uploads.abort(uploads.create("b", NBYTES))
