"""The log of the names that were collected lately, by which a client knows that a file without a record was deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.nodes import directories

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records import recently_collected
from ckpt.storage.registers.base import RegisterValue


def test_collected_names_are_remembered_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are too many, the oldest are forgotten, and a name that may be forgotten counts as collected."""
    monkeypatch.setattr(recently_collected, "_MAX_NAMES", 3)
    namespace = Namespace(directories(tmp_path, 3))
    namespace.put("a", b"1")
    assert not recently_collected.is_collected_since(namespace, "a", 1)
    for number, names in ((3, ["/a", "/b"]), (4, ["/c"])):
        recently_collected.record_collection(namespace, number, names)
    for path, number, expected in (("a", 2, True), ("a", 3, False), ("c", 3, True), ("d", 2, False)):
        assert recently_collected.is_collected_since(namespace, path, number) == expected, (path, number)
    recently_collected.record_collection(namespace, 5, ["/e"])
    assert recently_collected.is_collected_since(namespace, "d", 2), "names collected by 3 are forgotten"
    assert not recently_collected.is_collected_since(namespace, "d", 3)
    namespace.update_register(recently_collected.COLLECTED_REGISTER, lambda _, value: RegisterValue(b"what no version writes"))
    assert recently_collected.is_collected_since(namespace, "d", 9)
    recently_collected.record_collection(namespace, 10, ["/f"])
    assert not recently_collected.is_collected_since(namespace, "d", 10)
    assert recently_collected.is_collected_since(namespace, "d", 9)
    namespace.close()
