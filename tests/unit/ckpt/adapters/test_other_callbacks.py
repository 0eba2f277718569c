"""What other callbacks count is saved whatever container they count in, and what can't be saved is named."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.adapters.other_callbacks import OtherCallbacks
from ckpt.errors import FormatError


class Counting:
    """A callback with an attribute of each kind of container."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque([0.5], maxlen=3)
        self.seen: set[Any] = set()
        self.frozen: frozenset[int] = frozenset()
        self.by_name: defaultdict[str, list[int]] = defaultdict(list)
        self.numbers: Counter[str] = Counter()
        self.ordered: OrderedDict[str, int] = OrderedDict()
        self.by_pair: dict[Any, float] = {}
        self.nested: list[Any] = []
        self.raw = b""

    def count(self) -> None:
        self.recent.extend([1.0, 2.0, 3.0])
        self.seen |= {3, "b", (1, 2)}
        self.frozen = frozenset([4])
        self.by_name["a"].append(5)
        self.numbers["x"] += 2
        self.ordered["last"] = self.ordered["first"] = 1
        self.by_pair[0, "a"] = 0.25
        self.nested.append({"window": deque([1])})
        self.raw = b"\x00\x01"


def _saved(callback: object, url: Path) -> dict[str, dict[str, Any]]:
    """Return what a save and a load of the changed attributes give."""
    others = OtherCallbacks([callback])
    others.note_begin()
    callback.count()  # type: ignore[attr-defined]
    ckpt.save({"callbacks": others.changed()}, url, step=0)
    found: dict[str, dict[str, Any]] = ckpt.load(url)["callbacks"]
    return found


def test_containers_of_every_kind_are_restored(tmp_path: Path) -> None:
    counted, restored = Counting(), Counting()
    OtherCallbacks([restored]).restore(_saved(counted, tmp_path))
    assert vars(restored) == vars(counted)
    assert [type(each) for each in vars(restored).values()] == [type(each) for each in vars(counted).values()]
    assert restored.recent.maxlen == 3
    assert list(restored.ordered) == ["last", "first"]
    assert restored.by_name["new"] == []


def test_unchanged_containers_are_not_saved() -> None:
    others = OtherCallbacks([Counting()])
    others.note_begin()
    assert others.changed() == {"Counting_0": {}}


class Queueing:
    def __init__(self) -> None:
        self.recent: deque[Any] = deque()

    def count(self) -> None:
        self.recent.append(object())


def test_container_that_cannot_be_stored_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        callback = Queueing()
        others = OtherCallbacks([callback])
        others.note_begin()
        callback.count()
        assert others.changed() == others.changed() == {"Queueing_0": {}}
    assert [record.getMessage() for record in caplog.records] == [
        "Queueing.recent is not saved, because the deque has values other than numbers, texts and arrays: a resumed training "
        "begins without them; keep numbers there"
    ]


def test_container_of_a_newer_version_is_refused_by_name() -> None:
    saved = {"Counting_0": {"recent": {"container of a callback": "ring", "items": [1]}}}
    with pytest.raises(FormatError, match="saved with a ring, which this version of ckpt can't load: update ckpt"):
        OtherCallbacks([Counting()]).restore(saved)
