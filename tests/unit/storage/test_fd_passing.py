"""A client on the host of a node: bytes go through passed descriptors, and over the wire where that is impossible."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.flipped_bits import flip_bit
from helpers.node_fixtures import DATA, bytes_by_way, files, open_objects, open_objects_now
from helpers.node_fixtures import local_node as local_node
from helpers.node_fixtures import node as node
from helpers.node_fixtures import store as store
from helpers.nodes import LocalNode, NodeProcess, nodes_config, quick
from helpers.whole_namespaces import require_whole
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.aggregator.maintenance import repair, scrub
from ckpt.storage.base import failpoints
from ckpt.storage.base.errors import NoSpace, NotFound, StoreError, Unavailable
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.base.fd_io import AppendFile
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.durable_writer import LocalWriter
from ckpt.storage.node import wire
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.node.upload_leases import LeasedUpload, UploadLeases
from ckpt.storage.testing import read_range, write_object

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets of abstract names are Linux's")


@pytest.mark.parametrize("options", [(), ("--no-fd-passing",), ("--no-near",)])
def test_bytes_go_through_descriptors_unless_the_node_refuses(tmp_path: Path, options: tuple[str, ...]) -> None:
    node = NodeProcess(tmp_path / "data", *options)
    try:
        store = NodeStore(node.address)
        assert write_object(store, "a/b", DATA) == len(DATA)
        assert store.get("a/b") == DATA
        assert read_range(store, "a/b", 1000, 5000) == DATA[1000:6000]
        with pytest.raises(NotFound, match="a/none"):
            read_range(store, "a/none", 0, 10)
        counted = bytes_by_way(node)
        if options:
            assert counted["received"] == len(DATA)
            assert counted["sent"] > len(DATA)
            assert "near" not in counted
        else:
            assert counted == {"near": len(DATA)}
        assert not open_objects()
    finally:
        node.close()


@pytest.mark.parametrize("near_by", [True, False])
def test_an_append_longer_than_a_message_needs_descriptors(tmp_path: Path, near_by: bool) -> None:
    node = LocalNode(tmp_path / "data", NodeOptions(pass_descriptors=near_by))
    data = memoryview(bytearray(wire.MESSAGE_BYTES + 1))
    try:
        with NodeStore(node.address).create("a") as writer:
            if near_by:
                writer.append(data)
                assert writer.commit() == len(data)
            else:
                with pytest.raises(StoreError, match="append at most"):
                    writer.append(data)
    finally:
        node.close()


def test_rot_is_found_by_readers_that_use_descriptors(tmp_path: Path) -> None:
    """A client that reads the file by itself finds a byte that flipped on the disk."""
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(3)]
    namespace = quick(nodes_config(nodes, redundancy="2x"))
    try:
        namespace.put("a", DATA)
        victim = next(path for node in nodes for path in files(node.folder))
        flip_bit(victim, 100_000)
        for _ in range(2):
            assert namespace.get("a") == DATA
        found = scrub.scrub_namespace(namespace, verify=True)
        assert [health.path for health in found.damaged_files] == ["a"]
        assert not repair.repair_namespace(namespace, found).failed
        require_whole(namespace, verify=True)
    finally:
        namespace.close()
        for node in nodes:
            node.close()


def test_a_forgotten_writer_keeps_no_descriptor_open(node: NodeProcess) -> None:
    """A writer may neither commit nor abort, for example if a thread pool ends before its calls."""
    writer = NodeStore(node.address).create("a", len(DATA))
    writer.append(memoryview(DATA))
    assert open_objects_now()
    del writer
    assert not open_objects_now()


def test_growing_uploads_share_the_free_space_exactly(tmp_path: Path) -> None:
    """Two uploads that grow get the free space to the last byte, and no more."""
    limit = 10 << 20
    uploads = UploadLeases(LocalStore(tmp_path), lambda promised: limit - promised, 60.0)
    a, b = uploads.create("a", 1 << 20), uploads.create("b", 0)
    assert uploads.reserve(a, 2 << 20, 64 << 20) == 10 << 20
    with pytest.raises(NoSpace, match="do not fit: 0 are free"):
        uploads.reserve(b, 1, 64 << 20)
    assert uploads.reserve(a, 3 << 20, 64 << 20) == 10 << 20, "as promised"
    with pytest.raises(NoSpace, match="do not fit"):
        uploads.reserve(a, (10 << 20) + 1, 64 << 20)
    uploads.abort(a)
    assert uploads.reserve(b, 1, 4 << 20) == 4 << 20
    with pytest.raises(NoSpace):
        uploads.create("c", 7 << 20)
    assert uploads.create("c", 6 << 20)
    with pytest.raises(NotFound, match="write the object again"):
        uploads.reserve(a, 1, 1)


def test_uploads_that_begin_together_share_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the second one is created while that of the first one is."""
    store = LocalStore(tmp_path)
    uploads = UploadLeases(store, lambda promised: 100 - promised, 60.0)
    create, errors = store.create, list[NoSpace]()

    def create_both(name: str, size_hint: int) -> LocalWriter:
        if name == "a":
            with pytest.raises(NoSpace, match="20 bytes are free") as raised:
                uploads.create("b", 80)
            errors.append(raised.value)
        return create(name, size_hint)

    with monkeypatch.context() as patch:
        patch.setattr(store, "create", create_both)
        key = uploads.create("a", 80)
    assert len(errors) == 1
    uploads.abort(key)
    assert uploads.create("b", 80)


def test_an_upload_whose_file_is_not_created_reserves_nothing(tmp_path: Path) -> None:
    uploads = UploadLeases(LocalStore(tmp_path), lambda promised: 100 - promised, 60.0)
    (tmp_path / "f").write_text("a file where the upload needs a folder")
    with pytest.raises(StoreError):
        uploads.create("f/a", 80)
    assert uploads.create("b", 80)


class _WatchedUpload(LeasedUpload):
    """An upload that records each reservation."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "reserved_bytes":
            self.__dict__.setdefault("recorded", []).append(value)
        super().__setattr__(name, value)


def test_a_refused_reservation_takes_no_space_from_others(tmp_path: Path) -> None:
    """Not even for a moment, in which a small file of another client would be refused."""
    uploads = UploadLeases(LocalStore(tmp_path), lambda promised: 100 - promised, 60.0)
    key = uploads.create("a", 10)
    upload = uploads._uploads[key]
    upload.__class__ = _WatchedUpload
    with pytest.raises(NoSpace, match="do not fit"):
        uploads.reserve(key, 200, 400)
    assert "recorded" not in upload.__dict__
    assert uploads.reserve(key, 20, 30) == 30
    assert upload.__dict__["recorded"] == [30]


def test_an_upload_whose_descriptors_do_not_arrive_is_discarded(
    local_node: LocalNode, store: NodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(*arguments: object) -> None:
        raise Unavailable("the node did not open the file")

    monkeypatch.setattr(store._fd_client, "_request", time_out)
    with pytest.raises(Unavailable, match="did not open"):
        store.create("a", 1000)
    assert len(local_node.server.uploads) == 0


VERBS = st.sampled_from(["create", "reserve", "reserve", "abort", "commit"])


STEPS = st.lists(st.tuples(VERBS, st.integers(0, 3), st.integers(0, 40), st.integers(0, 40)), max_size=30)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_reservations_never_exceed_the_free_space(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int, int]]
) -> None:
    limit, used = 50, 0
    uploads = UploadLeases(LocalStore(tmp_path_factory.mktemp("store")), lambda promised: limit - used - promised, 60.0)
    keys: dict[int, tuple[str, int]] = {}
    for verb, number, needed, more in steps:
        try:
            if verb == "create" and number not in keys:
                keys[number] = uploads.create(f"f{number}", needed), needed
            elif number in keys and verb == "reserve":
                key, had = keys[number]
                found = uploads.reserve(key, needed, needed + more)
                assert found >= max(had, needed)
                assert found <= max(had, needed + more)
                keys[number] = key, found
            elif number in keys and verb in ("abort", "commit"):
                key, had = keys.pop(number)
                if verb == "commit":
                    assert uploads.commit(key, had) == had
                    used += had
                else:
                    uploads.abort(key)
        except NoSpace:
            assert needed + used + sum(had for n, (_, had) in keys.items() if n != number) > limit
        assert used + sum(had for _, had in keys.values()) <= limit


def test_a_node_with_a_capacity_refuses_more_bytes(tmp_path: Path) -> None:
    node = LocalNode(tmp_path / "data", capacity=8_000_000)
    try:
        store = NodeStore(node.address)
        with store.create("a") as writer:
            for _ in range(2):
                writer.append(memoryview(DATA))
            with pytest.raises(NoSpace, match="more bytes of a do not fit"):
                writer.append(memoryview(DATA))
            assert writer.commit() == 2 * len(DATA)
        assert store.get("a") == 2 * DATA
    finally:
        node.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_raises_no_space_and_is_usable_again(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path / "data")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine can't mount a file system")
    node = NodeProcess(tmp_path / "data")
    try:
        store = NodeStore(node.address)
        with store.create("a") as writer:
            for _ in range(4):
                writer.append(memoryview(DATA))
            with pytest.raises(NoSpace):
                for _ in range(4):
                    writer.append(memoryview(DATA))
        with store.create("b") as writer:  # all space is free again
            for _ in range(4):
                writer.append(memoryview(DATA))
            assert writer.commit() == 4 * len(DATA)
        assert store.get("b") == 4 * DATA
        assert bytes_by_way(node) == {"near": 4 * len(DATA)}
    finally:
        node.close()
        subprocess.run(["umount", "-l", str(tmp_path / "data")], check=True)


@pytest.mark.parametrize(("point", "kind"), [("full", NoSpace), ("error", StoreError)])
def test_a_disk_error_during_an_append_is_raised_and_leaves_no_file(
    local_node: LocalNode, point: str, kind: type[StoreError]
) -> None:
    """The errors are the same as those of a local directory."""
    store = NodeStore(local_node.address)
    set_failpoints(f"local.append={point}@2")
    try:
        with store.create("a") as writer:
            writer.append(memoryview(DATA))
            with pytest.raises(kind, match="writing node://.*/a failed"):
                writer.append(memoryview(DATA))
    finally:
        set_failpoints("")
    assert not files(local_node.folder)
    assert not open_objects()


def test_an_open_reader_reads_a_deleted_object(local_node: LocalNode) -> None:
    store = NodeStore(local_node.address)
    write_object(store, "a", DATA)
    with store.open("a") as reader:
        buffer = memoryview(bytearray(len(DATA)))
        assert reader.read_into(0, buffer[:100]) == 100
        store.delete(["a"])
        assert reader.read_into(0, buffer) == len(DATA)
        assert buffer == DATA
    with pytest.raises(NotFound):
        store.get("a")
    assert not open_objects()


def test_the_buffer_of_a_running_read_can_not_be_released(local_node: LocalNode) -> None:
    """After a timeout the caller can find out whether the kernel may still write to its buffer."""
    store = NodeStore(local_node.address)
    write_object(store, "a", DATA)
    memory = bytearray(len(DATA))
    view = memoryview(memory)
    set_failpoints("local.read=sleep:0.5@1")
    try:
        with store.open("a") as reader:
            thread = threading.Thread(target=reader.read_into, args=(0, view))
            thread.start()
            while not failpoints._passes.get("local.read"):
                time.sleep(0.001)
            with pytest.raises(BufferError):
                view.release()
            thread.join()
            view.release()
        assert memory == DATA
    finally:
        set_failpoints("")


def test_a_copy_on_another_node_is_read_after_a_disk_error(tmp_path: Path) -> None:
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(3)]
    namespace = quick(nodes_config(nodes, redundancy="2x"))
    try:
        namespace.put("a", DATA)
        set_failpoints("local.read=error@1")
        assert namespace.get("a") == DATA
        assert failpoints._passes["local.read"] > 1, "another copy was read"
        set_failpoints("local.read=error@*")
        with pytest.raises(StoreError, match="check the disk"):
            namespace.get("a")
    finally:
        set_failpoints("")
        namespace.close()
        for node in nodes:
            node.close()


def test_a_file_is_closed_with_its_last_append(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    file = AppendFile(fd, None, "a")
    with file.reserve_range(5) as position:
        assert not file.close(), "one append is running"
        with pytest.raises(StoreError, match="finished already"), file.reserve_range(5):
            pass
        file.write(memoryview(b"hello"), position)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert file.close()
    assert (tmp_path / "a").read_bytes() == b"hello"


def test_a_commit_waits_for_running_appends(local_node: LocalNode) -> None:
    """A committed object is not written to any more."""
    store = NodeStore(local_node.address)
    writer = store.create("a")
    reserved, proceed = threading.Event(), threading.Event()

    def append() -> None:
        with writer._file.reserve_range(len(DATA)) as position:
            reserved.set()
            proceed.wait(600)
            writer._file.write(memoryview(DATA), position)

    thread = threading.Thread(target=append)
    thread.start()
    reserved.wait(600)
    writer._deadline_seconds = 0.05
    with pytest.raises(Unavailable, match="check the disk"):
        writer.commit()
    proceed.set()
    thread.join()
    assert writer.commit() == len(DATA)
    assert store.get("a") == DATA


def test_a_commit_of_a_length_that_was_not_written_is_refused(local_node: LocalNode) -> None:
    store = NodeStore(local_node.address)
    writer = store.create("a")
    writer.append(memoryview(DATA))
    with pytest.raises(StoreError, match="instead of .*; write it again"):
        store.call("commit", writer._key, 1 << 40)
    writer.abort()
    assert not files(local_node.folder)
