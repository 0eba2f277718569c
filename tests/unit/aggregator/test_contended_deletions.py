"""Deletions of a file that another client changes at the same moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.nodes import directories

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records import paxos


@pytest.mark.parametrize("count", range(1, 12))
def test_a_deletion_deletes_what_another_client_has_just_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Whether the history of the file becomes full by that write, was full before, or is not full."""
    mine, other = (Namespace(directories(tmp_path, 3, redundancy="2x")) for _ in range(2))
    for number in range(count):
        mine.put("a", b"%d" % number)
    passed: list[str] = []

    def write_once(name: str) -> None:
        if name == "register.change" and not passed:
            passed.append(name)
            other.put("a", b"by another client")

    monkeypatch.setattr(paxos, "failpoint", write_once)
    deleted = mine.delete(["a"])
    monkeypatch.undo()
    if not passed:  # the deletion of a file with a full history begins with two phases
        assert count > 8
    assert deleted == ["a"]
    assert mine.stat("a") is None
    for namespace in (mine, other):
        namespace.close()
