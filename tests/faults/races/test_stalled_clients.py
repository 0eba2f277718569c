"""Clients that stop reading or writing: they take no resources from others, and a node still ends."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.flight as flight
import pytest
from helpers.nodes import LocalNode, NodeProcess

from ckpt.storage.base.buffer_pool import BufferPool
from ckpt.storage.base.checksums import transfer_digest
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.node import wire
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import random_bytes, read_range, write_object

_BIG = 8 << 20


def begin_append(store: NodeStore, key: str, data: bytes) -> tuple[flight.FlightStreamWriter, flight.FlightMetadataReader]:
    """Start an append of which only the first bytes are sent, by a client without a deadline; return its stream."""
    descriptor = flight.FlightDescriptor.for_command(wire.pack([key, len(data), transfer_digest(data)]))
    writer, reader = flight.FlightClient(f"grpc://{store.address}").do_put(descriptor, wire.SCHEMA)
    writer.write_batch(wire.to_record_batch(memoryview(data)[:1000]))
    return writer, reader


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    started = LocalNode(tmp_path / "node", NodeOptions(pass_descriptors=False, buffer_bytes=2 * _BIG, buffer_wait_seconds=2.0))
    yield started
    started.close()


def test_stalled_appends_give_their_buffers_to_other_writers(node: LocalNode) -> None:
    store = NodeStore(node.address, NodeCredentials(deadline_seconds=60))
    data = random_bytes(_BIG)
    keys = [store.call("create", f"stalled{i}", 0) for i in range(2)]
    stalled = [begin_append(store, key, data) for key in keys]
    write_object(store, "other", data)
    assert read_range(store, "other", 0, _BIG) == data
    outcomes = []
    for writer, reader in stalled:  # they resume: where the buffer is gone they are refused, and may send again
        try:
            with store.convert_flight_errors("test"):
                writer.write_batch(wire.to_record_batch(memoryview(data)[1000:]))
                writer.done_writing()
                reader.read()
                writer.close()
                outcomes.append(True)
        except Unavailable as error:
            assert "given to another writer" in str(error)
            outcomes.append(False)
    assert not all(outcomes)
    for key, done in zip(keys, outcomes, strict=True):
        assert store.append(key, memoryview(data)) == (_BIG if done else 0)
        assert store.call("commit", key) == (2 * _BIG if done else _BIG)
    assert read_range(store, "stalled0", 0, _BIG) == data


def test_a_full_buffer_is_not_given_to_another_writer() -> None:
    """The disk may take long to write it."""
    buffers = BufferPool(1 << 20)
    with buffers.borrow(5, 1.0) as loan:
        loan.append(memoryview(b"hello"))
        with pytest.raises(Unavailable, match="write with fewer clients at once"), buffers.borrow(5, 0.1):
            pass
        with loan.full_view() as received:
            assert received == b"hello"
    with buffers.borrow(5, 0.1) as loan:
        with buffers.borrow(5, 0.1) as other:
            other.append(memoryview(b"world"))
            with pytest.raises(Unavailable, match="given to another writer"):
                loan.append(memoryview(b"hello"))
            with other.full_view() as received:
                assert received == b"world"
        with buffers.borrow(5, 0.1):
            pass


def test_a_stalled_read_does_not_keep_a_file_open(tmp_path: Path) -> None:
    """So the space of a deleted file is freed, even if a client has not read it to its end."""
    node = LocalNode(tmp_path, NodeOptions(pass_descriptors=False, lease_seconds=0.2))
    try:
        store = NodeStore(node.address, NodeCredentials(deadline_seconds=60))
        data = random_bytes(1 << 20) * 256  # more than the buffers of TCP and gRPC take, which are tens of megabytes
        node.device.store.put("a", data)
        with store.convert_flight_errors("test"):
            stalled = store.next_connection().do_get(flight.Ticket(wire.pack(["a", 0, len(data)])), store.call_options())
            stalled.read_chunk()

        def is_open() -> bool:
            links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
            return any(os.path.islink(link) and os.readlink(link).startswith(f"{tmp_path}/objects/a") for link in links)

        deadline = time.monotonic() + 600
        while is_open():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(Unavailable, match="read it again"), store.convert_flight_errors("test"):
            while True:
                stalled.read_chunk()
        assert read_range(store, "a", 0, 1000) == data[:1000]
    finally:
        node.close()


def accepts(task: Path, number: int) -> bool:
    """Whether a thread, by its folder in /proc, does not block a signal. Threads of libraries may block all of them."""
    blocked = re.search(r"^SigBlk:\s*(\w+)", (task / "status").read_text(), re.MULTILINE)
    assert blocked
    return not int(blocked[1], 16) >> (number - 1) & 1


def test_a_node_ends_by_a_signal_that_does_not_interrupt_its_wait(tmp_path: Path) -> None:
    """The signal arrives just before the wait, or another thread receives it."""
    node = NodeProcess(tmp_path / "data")
    try:
        threads = [task for task in Path(f"/proc/{node.process.pid}/task").iterdir() if int(task.name) != node.process.pid]
        other = next(int(task.name) for task in threads if accepts(task, signal.SIGTERM))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.tgkill(node.process.pid, other, signal.SIGTERM) == 0, os.strerror(ctypes.get_errno())
        assert node.process.wait(600) == 0
    finally:
        node.close()


def test_a_node_ends_by_sigterm_despite_stalled_clients(tmp_path: Path) -> None:
    """The calls of clients without a deadline never end by themselves."""
    node = NodeProcess(tmp_path / "data", "--no-fd-passing", "--drain-seconds", "0.5")
    try:
        store = NodeStore(node.address)
        data = random_bytes(32 << 20)
        write_object(store, "kept", data)
        writing = begin_append(store, store.call("create", "torn", 0), data[:_BIG])
        reading = flight.FlightClient(f"grpc://{node.address}").do_get(flight.Ticket(wire.pack(["kept", 0, 32 << 20])))
        node.signal(signal.SIGTERM)
        assert node.process.wait(600) == 0
        assert writing
        assert reading
        node.start()
        assert read_range(store, "kept", 0, 1000) == data[:1000]
        assert [entry.name for entry in store.list()] == ["kept"]
    finally:
        node.close()
