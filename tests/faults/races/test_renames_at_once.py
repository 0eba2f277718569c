"""Two clients rename a file at the same time, or one makes a folder of the new name: no bytes are lost, and none are left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.races import FIRST
from helpers.races import open_client as open_client

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.base.errors import AlreadyExists


def test_a_rename_that_is_refused_late_does_not_mark_the_file(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client makes a folder of the new name after that was checked."""
    one, other = open_client(), open_client()
    one.put("x", FIRST)
    publish = one.publish

    def publish_after_the_other(*args: Any, **options: Any) -> Any:
        other.make_folder("folder")
        return publish(*args, **options)

    monkeypatch.setattr(one, "publish", publish_after_the_other)
    with pytest.raises(AlreadyExists, match="a folder of this name exists already"):
        one.rename("x", "folder")
    monkeypatch.undo()
    file = one.stat("x")
    assert file is not None
    assert not file.rename_token
    one.put("x", b"small")
    assert not any(member.inventory() for member in one.open_members.values())


@pytest.mark.parametrize("deleted", ["b", "c"])
def test_a_rename_that_ends_during_another_one_leaves_both_names_readable(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch, deleted: str
) -> None:
    """Both names have the same objects then, so the deletion of one must keep them."""
    first, second = open_client(), open_client()
    first.put("x", FIRST)
    is_marked_by_second = threading.Event()
    publish_first, publish_second = first.publish, second.publish

    def publish_after_the_mark(*args: Any, **options: Any) -> Any:
        rename_to_c.start()
        assert is_marked_by_second.wait(600)
        return publish_first(*args, **options)

    def publish_after_the_rename(*args: Any, **options: Any) -> Any:
        is_marked_by_second.set()
        assert is_renamed_to_b.wait(600)
        return publish_second(*args, **options)

    monkeypatch.setattr(first, "publish", publish_after_the_mark)
    monkeypatch.setattr(second, "publish", publish_after_the_rename)
    is_renamed_to_b = threading.Event()
    rename_to_c = threading.Thread(target=second.rename, args=("x", "c"))
    first.rename("x", "b")
    assert first.stat("x") is None
    is_renamed_to_b.set()
    rename_to_c.join(600)
    assert first.get("b") == first.get("c") == FIRST
    assert first.delete([deleted]) == [deleted]
    assert first.get("c" if deleted == "b" else "b") == FIRST


def test_a_rename_that_another_one_follows_at_once_loses_no_data(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins before the first one has removed its mark from the new name, and ends after that."""
    first, second = open_client(), open_client()
    first.put("x", FIRST)
    publish_second = second.publish
    set_token = first._set_rename_token
    is_marked, is_unmarked = threading.Event(), threading.Event()

    def publish_after_the_first(*args: Any, **options: Any) -> Any:
        is_marked.set()
        assert is_unmarked.wait(600)
        return publish_second(*args, **options)

    def unmark_after_the_second(path: str, *arguments: Any) -> Any:
        if path == "b":
            follow.start()
            assert is_marked.wait(600)
        return set_token(path, *arguments)

    monkeypatch.setattr(second, "publish", publish_after_the_first)
    monkeypatch.setattr(first, "_set_rename_token", unmark_after_the_second)
    follow = threading.Thread(target=second.rename, args=("b", "c"))
    first.rename("x", "b")
    is_unmarked.set()
    follow.join(600)
    assert first.get("c") == FIRST
    first.delete(["b"])
    assert first.get("c") == FIRST
