"""An object that a node sends is closed once its client reads nothing, and not while the disk is slow."""

from __future__ import annotations

import threading

from ckpt.storage.base.store import Reader
from ckpt.storage.node.outgoing_object import OutgoingObject


class SlowReader(Reader):
    """A reader of which a read begins, and ends only when the test lets it."""

    def __init__(self) -> None:
        self.begun, self.resumed = threading.Event(), threading.Event()
        self.is_closed = False

    def read_into(self, position: int, buffer: memoryview) -> int:
        self.begun.set()
        assert self.resumed.wait(300)
        return len(buffer)

    def close(self) -> None:
        self.is_closed = True


def test_nothing_waits_for_the_disk_to_see_whether_a_read_has_expired() -> None:
    """The thread that asks also ends the uploads of lost clients, which hold disk space."""
    reader = SlowReader()
    sending = OutgoingObject("a", reader)
    reading = threading.Thread(target=sending.read_into, args=(0, memoryview(bytearray(10))), daemon=True)
    reading.start()
    assert reader.begun.wait(300)
    assert not sending.expire(0.0), "it has waited for the end of the read"
    reader.resumed.set()
    reading.join()
    assert not reader.is_closed
    assert sending.expire(0.0)
    assert reader.is_closed
