"""A client that has an upload open and writes nothing for longer than its lease, and one that has abandoned it."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.node_fixtures import DATA, files, open_objects
from helpers.nodes import LocalNode, nodes_config, quick
from helpers.processes import stop, until

from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.server import NodeOptions

LEASE_SECONDS = 8.0
SEVERAL_RENEWALS = 8
"""A client renews a lease four times in its length, so these renewals take longer than the lease."""


@pytest.fixture(params=["descriptors", "wire"])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalNode]:
    """Yield a node with short leases, whose clients write to its files, or over the wire."""
    started = LocalNode(tmp_path / "data", NodeOptions(lease_seconds=LEASE_SECONDS))
    if request.param == "wire":
        assert started.server._fd_server is not None
        started.server._fd_server.close()
    yield started
    started.close()


def wait_longer_than_a_lease(node: LocalNode) -> None:
    before = renewals(node)
    until(lambda: renewals(node) >= before + SEVERAL_RENEWALS or not node.server.uploads, "the lease is renewed, or ends")


def renewals(node: LocalNode) -> float:
    return node.server.counters.get(("calls", "reserve"), 0)


def is_renewing() -> bool:
    return any(thread.name == "ckpt-upload-leases" for thread in threading.enumerate())


def test_a_file_whose_writer_pauses_is_whole(node: LocalNode) -> None:
    """A mounted file or an fsspec file stays open as long as its user has it open."""
    namespace = quick(nodes_config([node]))
    with namespace.create("a", aligned=False) as writer:
        writer.append(memoryview(DATA))
        wait_longer_than_a_lease(node)
        assert len(node.server.uploads) == 1
        writer.append(memoryview(DATA))
        writer.commit()
    assert namespace.get("a") == DATA + DATA
    namespace.close()


def test_the_upload_of_a_writer_that_was_collected_expires(node: LocalNode) -> None:
    store = NodeStore(node.address)
    abandoned, open_writer = store.create("a"), store.create("b")
    abandoned.append(memoryview(DATA))
    del abandoned
    gc.collect()
    until(lambda: len(node.server.uploads) <= 1, "the upload of the abandoned writer has expired")
    with open_writer:
        open_writer.append(memoryview(DATA))
        assert open_writer.commit() == len(DATA)
    until(lambda: [path.name for path in files(node.folder)] == ["b"], "the abandoned file is deleted")


def test_no_thread_renews_leases_once_all_writers_are_done(node: LocalNode) -> None:
    store = NodeStore(node.address)
    writers = [store.create(name) for name in "abc"]
    assert is_renewing()
    writers[0].commit()
    writers[1].abort()
    writers.clear()
    gc.collect()
    until(lambda: not is_renewing(), "the thread has ended")
    with store.create("d") as writer:
        assert is_renewing(), "a new writer starts it again"
        writer.commit()
    until(lambda: not is_renewing(), "the thread has ended")


STOPPED = """
import sys
from ckpt.storage.base.errors import StoreError
from ckpt.storage.node.client import NodeStore
store = NodeStore(sys.argv[1])
writers = [store.create("a"), store.create("b")]
for writer in writers:
    writer.append(memoryview(bytes(100_000)))
print("written", flush=True)
input()
for call in (lambda: writers[0].append(memoryview(bytes(100_000))), writers[1].commit):
    try:
        call()
    except StoreError as error:
        print(type(error).__name__, error, flush=True)
"""


def test_a_client_that_returns_after_its_lease_is_refused(node: LocalNode) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", STOPPED, node.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "written\n"
        stop(client.pid)
        until(lambda: not len(node.server.uploads), "the uploads of the stopped client have expired")
        client.send_signal(signal.SIGCONT)
        found, _ = client.communicate("\n", timeout=600)
        assert [line.split()[0] for line in found.splitlines()] == ["NotFound", "NotFound"]
        assert found.count("write the object again") == 2
    finally:
        client.kill()
        client.wait()
    until(lambda: not files(node.folder), "the files are deleted")
    assert not open_objects()
