"""Threads of a mount change a file while another thread of the same mount looks it up for an open handle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.mount_trees import namespace as namespace
from helpers.mount_trees import tree as tree

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.base.errors import Unavailable
from ckpt.tools.mount_operations import MountOperations

Change = Callable[[MountOperations], None]


def store(tree: MountOperations, path: str, data: bytes, position: int = 0) -> None:
    """Write bytes into a file, which is created if they are its first ones, and close it."""
    handle = tree.open(path, os.O_WRONLY) if position else tree.create(path, 0o644)
    tree.write(path, data, position, handle)
    tree.flush(path, handle)
    tree.release(path, handle)


def in_another_thread(work: Callable[[], Any]) -> None:
    """Do some work in another thread, and wait for it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()
    assert not errors, errors


def after_next_call(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, work: Callable[[], Any]) -> None:
    """Let another thread do some work when the next call of a method has ended, before its caller continues."""
    call = getattr(owner, name)

    def call_once(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, call)
        result = call(*args, **options)
        in_another_thread(work)
        return result

    monkeypatch.setattr(owner, name, call_once)


def empty(tree: MountOperations) -> None:
    tree.truncate("/a", 0)


def append(tree: MountOperations) -> None:
    store(tree, "/a", b"+3", 6)


def empty_and_write(tree: MountOperations) -> None:
    tree.truncate("/a", 0)
    handle = tree.open("/a", os.O_WRONLY)
    tree.write("/a", b"other content", 0, handle)
    tree.flush("/a", handle)
    tree.release("/a", handle)


@pytest.mark.parametrize(("change", "content"), [(empty, b""), (append, b"onetwo+3"), (empty_and_write, b"other content")])
def test_a_change_during_a_look_up_is_read_after_it(
    tree: MountOperations, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, change: Change, content: bytes
) -> None:
    store(tree, "/a", b"one")
    handle = tree.open("/a", os.O_RDONLY)
    store(tree, "/a", b"two", 3)
    after_next_call(monkeypatch, namespace, "stat", lambda: change(tree))
    assert tree.read("/a", 100, 0, handle) in (b"onetwo", content)
    assert tree.read("/a", 100, 0, handle) == namespace.get("a") == content
    assert tree.getattr("/a")["st_size"] == len(content)
    assert tree.read("/a", 100, 0, handle) == content


def test_a_look_up_that_fails_is_repeated(tree: MountOperations, namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tree, "/a", b"one")
    handle = tree.open("/a", os.O_RDONLY)
    store(tree, "/a", b"two", 3)

    def give_no_answer(path: str) -> None:
        raise Unavailable(f"{path}: no answer")

    with monkeypatch.context() as patch, pytest.raises(Unavailable):
        patch.setattr(namespace, "stat", give_no_answer)
        tree.read("/a", 100, 0, handle)
    assert tree.read("/a", 100, 0, handle) == b"onetwo"


def test_a_file_that_is_renamed_during_a_look_up_is_not_confused_with_the_next_one(
    tree: MountOperations, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tree, "/a", b"one")
    handle = tree.open("/a", os.O_RDONLY)
    store(tree, "/a", b"two", 3)
    stat = namespace.stat

    def rename_before(path: str) -> Any:
        monkeypatch.setattr(namespace, "stat", stat)
        in_another_thread(lambda: (tree.rename("/a", "/b"), store(tree, "/a", b"next file")))
        return stat(path)

    monkeypatch.setattr(namespace, "stat", rename_before)
    assert tree.read("/a", 100, 0, handle) == b"onetwo"
    assert tree.read("/a", 100, 0, handle) == b"onetwo"


@pytest.mark.parametrize("operation", ["truncate", "fsync", "rename"])
def test_a_look_up_during_a_change_of_this_mount_does_not_take_it_for_that_of_another_client(
    tree: MountOperations, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Another thread opens the file after the change is visible, before this mount has marked its open handles."""
    store(tree, "/a", b"one")
    handle = tree.open("/a", os.O_RDONLY)
    writing, path = -1, "/b" if operation == "rename" else "/a"
    if operation != "truncate":
        writing = tree.open("/a", os.O_WRONLY)
        tree.truncate("/a", 0)  # later writes replace the file
        tree.write("/a", b"two", 0, writing)
        tree.read("/a", 100, 0, handle)
    mark = tree._mark_outdated
    monkeypatch.setattr(
        tree, "_mark_outdated", lambda full: (in_another_thread(lambda: tree.open(path, os.O_RDONLY)), mark(full))[1]
    )
    if operation == "truncate":
        tree.truncate("/a", 0)
    elif operation == "fsync":
        tree.fsync("/a", 0, writing)
    else:
        tree.rename("/a", path)
    monkeypatch.undo()
    assert tree.read(path, 100, 0, handle) == (b"" if operation == "truncate" else b"two")
    if writing >= 0:
        tree.release(path, writing)
    assert tree.read(path, 100, 0, handle) == namespace.get(path[1:])
