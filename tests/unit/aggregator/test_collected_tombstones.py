"""The log of the names that were collected lately, by which a client knows that a file without a record was deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.nodes import directories

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records import collected_tombstones
from ckpt.storage.registers.base import RegisterValue


def test_collected_names_are_remembered_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are too many, the oldest are forgotten, and a name that may be forgotten counts as collected."""
    monkeypatch.setattr(collected_tombstones, "_MAX_NAMES", 3)
    namespace = Namespace(directories(tmp_path, 3))
    namespace.put("a", b"1")
    assert not collected_tombstones.is_collected_since(namespace, "a", 1)
    for number, names in ((3, ["/a", "/b"]), (4, ["/c"])):
        collected_tombstones.record_collection(namespace, number, names)
    for path, number, expected in (("a", 2, True), ("a", 3, False), ("c", 3, True), ("d", 2, False)):
        assert collected_tombstones.is_collected_since(namespace, path, number) == expected, (path, number)
    collected_tombstones.record_collection(namespace, 5, ["/e"])
    assert collected_tombstones.is_collected_since(namespace, "d", 2), "names collected by 3 are forgotten"
    assert not collected_tombstones.is_collected_since(namespace, "d", 3)
    namespace.update_register(
        collected_tombstones.COLLECTED_REGISTER, lambda _, value: RegisterValue(b"what no version writes")
    )
    assert collected_tombstones.is_collected_since(namespace, "d", 9)
    collected_tombstones.record_collection(namespace, 10, ["/f"])
    assert not collected_tombstones.is_collected_since(namespace, "d", 10)
    assert collected_tombstones.is_collected_since(namespace, "d", 9)
    namespace.close()
