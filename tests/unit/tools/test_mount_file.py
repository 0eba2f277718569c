"""Files that are written through the operations of a mount, without a mount, in a namespace on directories."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import closing
from pathlib import Path

import pytest
from helpers.mount_trees import namespace as namespace
from helpers.mount_trees import tree as tree
from helpers.nodes import node_processes, nodes_config

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance.scrub import scrub_namespace
from ckpt.storage.base.errors import Changed, Unavailable
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.testing import random_bytes
from ckpt.tools.mount_operations import MountOperations

_MIB = 1 << 20


def written(tree: MountOperations, path: str, data: bytes, flags: int = 0) -> int:
    """Return an open handle of the file after the data is written at its end."""
    handle = tree.open(path, os.O_WRONLY) if flags else tree.create(path, 0o644)
    tree.write(path, data, tree.getattr(path)["st_size"], handle)
    return handle


def close(tree: MountOperations, path: str, handle: int) -> None:
    """Flush and release a handle."""
    try:
        tree.flush(path, handle)
    finally:
        tree.release(path, handle)


def test_a_file_that_is_renamed_while_open_is_written_on(tree: MountOperations, namespace: Namespace) -> None:
    data = random_bytes(20 * _MIB + 5)
    for first, second in ((0, 10), (10, 50_000), (50_000, 50_001), (9 * _MIB, len(data))):
        handle = written(tree, "/a", data[:first])
        tree.rename("/a", "/b")
        tree.write("/b", data[first:second], first, handle)
        tree.fsync("/b", 0, handle)
        assert namespace.get("b") == data[:second]
        tree.rename("/b", "/c")
        tree.write("/c", b"end", second, handle)
        close(tree, "/c", handle)
        assert namespace.get("c") == data[:second] + b"end"
        assert list(namespace.list()) == ["c"]
        assert not tree._files_in_writing


def test_writes_out_of_order_are_accepted_until_the_file_is_visible(tree: MountOperations, namespace: Namespace) -> None:
    handle = written(tree, "/a", b"")
    tree.write("/a", b"2", 10, handle)
    tree.write("/a", b"1", 0, handle)
    tree.fsync("/a", 0, handle)
    assert namespace.get("a") == b"1" + bytes(9) + b"2"
    with pytest.raises(OSError, match="can't be changed"):
        tree.write("/a", b"3", 5, handle)
    tree.write("/a", b"4", 11, handle)
    tree.truncate("/a", 0)
    tree.write("/a", b"anew", 0, handle)
    close(tree, "/a", handle)
    assert namespace.get("a") == b"anew"


def test_truncated_bytes_do_not_return(tree: MountOperations, namespace: Namespace) -> None:
    for length, cut in ((100, 10), (9 * _MIB, 9 * _MIB - 5), (17 * _MIB, 3 * _MIB)):
        handle = written(tree, "/a", b"x" * length)
        tree.truncate("/a", cut)
        tree.write("/a", b"end", length + 10, handle)
        close(tree, "/a", handle)
        assert namespace.get("a") == b"x" * cut + bytes(length + 10 - cut) + b"end"
        tree.unlink("/a")


@pytest.mark.parametrize("size", [0, 100, 50_000])
@pytest.mark.parametrize("longer", [20_000, _MIB, 9 * _MIB])
def test_a_file_that_is_made_longer_is_filled_with_zeros(
    tree: MountOperations, namespace: Namespace, size: int, longer: int
) -> None:
    content = (b"x" * size).ljust(longer, b"\0")[: max(size, longer)]
    handle = written(tree, "/a", b"x" * size)
    tree.truncate("/a", len(content), handle)
    close(tree, "/a", handle)
    assert namespace.get("a") == content
    close(tree, "/a", written(tree, "/a", b"end", os.O_APPEND))
    assert namespace.get("a") == content + b"end"
    assert not scrub_namespace(namespace).lost_files
    close(tree, "/b", written(tree, "/b", b"x" * size))  # the same, after the first bytes are visible
    handle = tree.open("/b", os.O_WRONLY)
    tree.truncate("/b", len(content), handle)
    close(tree, "/b", handle)
    assert namespace.get("b") == content


def test_changes_by_other_clients_refuse_a_late_close(tree: MountOperations, namespace: Namespace) -> None:
    other = MountOperations(namespace, "")  # stands for another host
    for size in (5, 50_000):
        close(tree, "/log", written(tree, "/log", b"0" * size))
        first, second = written(tree, "/log", b"1", os.O_APPEND), written(other, "/log", b"2", os.O_APPEND)
        close(tree, "/log", first)
        with pytest.raises(Changed):
            close(other, "/log", second)
        assert namespace.get("log") == b"0" * size + b"1"
        lost = written(tree, "/log", b"2", os.O_APPEND)
        other.unlink("/log")
        with pytest.raises(Changed):
            close(tree, "/log", lost)
        assert namespace.stat("log") is None
    lost = written(tree, "/log", b"old")
    other.unlink("/log")
    new = written(tree, "/log", b"new")  # the name is free again, and now that of another file
    close(tree, "/log", lost)
    close(tree, "/log", new)
    assert namespace.get("log") == b"new"


def test_writes_of_others_into_an_empty_file_are_kept(tree: MountOperations, namespace: Namespace) -> None:
    other = MountOperations(namespace, "")
    for size in (5, 50_000):
        for flags in (0, os.O_APPEND):  # created by this client, or by another
            if flags:
                namespace.put("log", b"")
            first = written(tree, "/log", b"1" * size, flags)
            second = written(other, "/log", b"2" * size, os.O_APPEND)
            close(other, "/log", second)
            with pytest.raises(Changed):
                close(tree, "/log", first)
            assert namespace.get("log") == b"2" * size
            tree.unlink("/log")
    namespace.put("log", b"")
    handle = tree.open("/log", os.O_WRONLY | os.O_TRUNC)
    tree.write("/log", b"1", 0, handle)
    namespace.put("log", b"2")
    close(tree, "/log", handle)
    assert namespace.get("log") == b"1"


@pytest.mark.parametrize("size", [5, 50_000])
def test_truncation_does_not_delete_the_writes_of_others(tree: MountOperations, namespace: Namespace, size: int) -> None:
    namespace.put("a", b"0" * size)
    handle = tree.open("/a", os.O_WRONLY)
    namespace.put("a", b"precious" * size)
    with pytest.raises(Changed):
        tree.truncate("/a", 0, handle)
    close(tree, "/a", handle)
    assert namespace.get("a") == b"precious" * size
    handle = tree.open("/a", os.O_WRONLY)
    tree.truncate("/a", 0, handle)
    assert namespace.get("a") == b""
    tree.write("/a", b"1" * size, 0, handle)
    namespace.put("a", b"precious")
    with pytest.raises(Changed):
        close(tree, "/a", handle)
    assert namespace.get("a") == b"precious"
    handle = written(tree, "/a", b"1" * size, os.O_APPEND)
    tree.truncate("/a", 0, handle)
    tree.write("/a", b"2" * size, 0, handle)
    tree.truncate("/a", 0, handle)
    tree.write("/a", b"3" * size, 0, handle)
    close(tree, "/a", handle)
    assert namespace.get("a") == b"3" * size
    assert not any(member.info().uploads for member in namespace.open_members.values())
    gone = written(tree, "/a", b"1", os.O_APPEND)
    tree.unlink("/a")
    tree.truncate("/a", 0, gone)
    close(tree, "/a", gone)
    assert namespace.stat("a") is None


def test_a_failed_write_is_reported_again_at_the_close(tree: MountOperations, namespace: Namespace, tmp_path: Path) -> None:
    handle = written(tree, "/a", b"1" * 100_000)
    tree.fsync("/a", 0, handle)
    tree.write("/a", b"2" * 100_000, 100_000, handle)
    for i in range(2):
        (tmp_path / f"disk{i}").rename(tmp_path / f"gone{i}")
        (tmp_path / f"disk{i}").write_bytes(b"no folder")
    with pytest.raises(Unavailable):
        tree.fsync("/a", 0, handle)
    for i in range(2):
        (tmp_path / f"disk{i}").unlink()
        (tmp_path / f"gone{i}").rename(tmp_path / f"disk{i}")
    with pytest.raises(OSError, match="an earlier write failed"):
        close(tree, "/a", handle)


def test_a_write_that_is_repeated_after_an_error_loses_no_earlier_bytes(tmp_path: Path) -> None:
    """The kernel splits a write. If one part fails, the program gets a short count, and writes the rest again."""
    window, piece = 8 * _MIB, 128 << 10
    data = random_bytes(2 * window)
    with node_processes(tmp_path, 3) as nodes, closing(Namespace(nodes_config(nodes, redundancy="2x"))) as namespace:
        tree = MountOperations(namespace, "")
        close(tree, "/a", written(tree, "/a", data[:window]))
        handle = tree.open("/a", os.O_WRONLY)
        for position in range(window, 2 * window - piece, piece):
            tree.write("/a", data[position : position + piece], position, handle)
        for node in nodes[:2]:
            node.kill()
        with pytest.raises(Unavailable):
            tree.write("/a", data[-piece:], 2 * window - piece, handle)
        for node in nodes[:2]:
            node.start()
        tree.write("/a", data[-piece:], 2 * window - piece, handle)
        close(tree, "/a", handle)
        assert namespace.get("a") == data


def test_a_reader_of_a_file_that_is_written_out_of_order_sees_its_bytes_or_an_error(
    tree: MountOperations, namespace: Namespace
) -> None:
    data = random_bytes(18 * _MIB)
    handle = written(tree, "/a", data[: 9 * _MIB])
    reader = tree.open("/a", os.O_RDONLY)
    tree.write("/a", data[10 * _MIB : 11 * _MIB], 10 * _MIB, handle)
    expected = data[8 * _MIB : 9 * _MIB] + bytes(_MIB) + data[10 * _MIB : 11 * _MIB]
    assert tree.read("/a", 8 * _MIB, 8 * _MIB, reader) == expected
    with pytest.raises(OSError, match="bytes before its end are missing") as busy:
        tree.read("/a", _MIB, 0, reader)
    assert busy.value.errno == errno.EBUSY
    tree.write("/a", data[9 * _MIB : 10 * _MIB], 9 * _MIB, handle)
    assert tree.read("/a", 20 * _MIB, 0, reader) == data[: 11 * _MIB]
    tree.write("/a", data[11 * _MIB :], 11 * _MIB, handle)
    tree.rename("/a", "/.fuse_hidden01")
    assert tree.read("/.fuse_hidden01", _MIB, 17 * _MIB, reader) == data[17 * _MIB :]
    close(tree, "/.fuse_hidden01", handle)
    tree.release("/.fuse_hidden01", reader)


@pytest.mark.parametrize("first", [b"", b"1"], ids=["no byte of the first part", "some bytes of the first part"])
def test_a_read_of_a_later_part_leaves_the_first_one_writable(
    tree: MountOperations, namespace: Namespace, first: bytes
) -> None:
    data = random_bytes(16 * _MIB)
    handle = written(tree, "/a", first)
    tree.write("/a", data[8 * _MIB :], 8 * _MIB, handle)
    reader = tree.open("/a", os.O_RDONLY)
    with pytest.raises(OSError, match="bytes before its end are missing") as busy:
        tree.read("/a", 10, 8 * _MIB, reader)
    assert busy.value.errno == errno.EBUSY
    tree.write("/a", data[: 8 * _MIB], 0, handle)
    assert tree.read("/a", 10, 8 * _MIB, reader) == data[8 * _MIB :][:10]
    close(tree, "/a", handle)
    tree.release("/a", reader)
    assert namespace.get("a") == data


def test_a_reader_sees_what_another_client_wrote_beside_an_idle_writer(tree: MountOperations, namespace: Namespace) -> None:
    close(tree, "/a", written(tree, "/a", b"1"))
    handle = tree.open("/a", os.O_WRONLY)
    namespace.put("a", b"22")
    reader = tree.open("/a", os.O_RDONLY)
    assert tree.read("/a", 100, 0, reader) == b"22"
    tree.write("/a", b"3", 1, handle)  # refused at the close
    assert tree.read("/a", 100, 0, reader) == b"22"
    with pytest.raises(Changed):
        close(tree, "/a", handle)


def test_folders_are_created_renamed_and_removed(tree: MountOperations, namespace: Namespace) -> None:
    tree.mkdir("/a", 0)
    tree.mkdir("/a/e", 0)
    tree.mkdir("/b", 0)
    handle = written(tree, "/a/x", b"1")
    tree.rename("/a", "/b")
    tree.write("/b/x", b"2", 1, handle)
    close(tree, "/b/x", handle)
    assert list(namespace.list()) == ["b", "b/e", "b/x"]
    assert namespace.get("b/x") == b"12"
    for old, new, error in (
        ("/b", "/b/c", "into itself"), ("/b/e", "/b/x", "not a folder"), ("/none", "/n", "No such file"),
    ):  # fmt: skip
        with pytest.raises(OSError, match=error):
            tree.rename(old, new)
    with pytest.raises(NotADirectoryError):
        tree.rmdir("/b/x")
    tree.mkdir("/c", 0)
    with pytest.raises(OSError, match="not empty"):
        tree.rename("/c", "/b")
    assert list(namespace.list()) == ["b", "b/e", "b/x", "c"]
    assert stat.S_ISDIR(tree.getattr("/c")["st_mode"])


def test_a_file_that_is_removed_while_written_leaves_no_object(
    tree: MountOperations, namespace: Namespace, tmp_path: Path
) -> None:
    """libfuse renames a file that is removed while open to a hidden name, and removes that name after the close."""
    handle = written(tree, "/a", b"1" * 20 * _MIB)
    tree.rename("/a", "/.fuse_hidden01")
    tree.fsync("/.fuse_hidden01", 0, handle)
    tree.write("/.fuse_hidden01", b"2", 20 * _MIB, handle)
    close(tree, "/.fuse_hidden01", handle)
    tree.unlink("/.fuse_hidden01")
    assert namespace.list() == {}
    left = written(tree, "/a", b"1")
    tree.unlink("/a")
    close(tree, "/a", left)
    assert namespace.list() == {}
    assert not [p for p in tmp_path.glob("disk*/objects/**/*") if p.is_file()]


def test_an_interrupted_rename_leaves_two_independent_names(tree: MountOperations, namespace: Namespace) -> None:
    """Both names may have the same objects then: a change to one does not affect the other."""
    close(tree, "/a", written(tree, "/a", b"1" * 100_000))
    set_failpoints("namespace.renamed=error")
    with pytest.raises(OSError, match="injected"):
        tree.rename("/a", "/b")
    set_failpoints("")
    assert list(namespace.list()) == ["a", "b"]
    close(tree, "/b", written(tree, "/b", b"2", os.O_APPEND))
    assert namespace.get("b") == b"1" * 100_000 + b"2"
    tree.unlink("/b")
    assert namespace.get("a") == b"1" * 100_000
    tree.rename("/a", "/b")
    assert namespace.get("b") == b"1" * 100_000
