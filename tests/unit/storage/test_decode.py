"""Dataclasses from decoded JSON: unknown fields are ignored, and malformed fields are named in the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from ckpt.storage.base.checked_decode import Malformed, decode


@dataclass(frozen=True, slots=True)
class Inner:
    name: str
    size: int = 3


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    kind: Literal["a", "b"] = "a"
    share: float = 0.5
    pair: tuple[str, int] = ("x", 1)
    rows: tuple[Inner, ...] = ()
    names: Sequence[str] = ()
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    other: Inner | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        if self.share < 0:
            raise ValueError("it is negative")


GOOD: dict[str, Any] = {"inner": {"name": "n"}}


def test_all_types_are_decoded() -> None:
    data = {
        "inner": {"name": "n", "size": 4}, "kind": "b", "share": 1, "pair": ["y", 2], "rows": [{"name": "r"}], "names": ["a"],
        "sizes": {"k": 1, "l": None}, "other": {"name": "o"}, "anything": [{}],
    }  # fmt: skip
    found = decode(Outer, data)
    assert found == Outer(Inner("n", 4), "b", 1.0, ("y", 2), (Inner("r"),), ("a",), {"k": 1, "l": None}, Inner("o"), [{}])
    assert type(found.share) is float


def test_unknown_fields_are_ignored_and_missing_ones_have_their_default() -> None:
    assert decode(Outer, {**GOOD, "added_later": 1, "inner": {"name": "n", "more": [1]}}) == Outer(Inner("n"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"Outer is \[\], not a mapping"),
        ({}, r"Outer.inner is missing"),
        ({"inner": {"name": 3}}, r"Outer.inner.name is 3, not str"),
        ({"inner": {"name": "n", "size": True}}, r"Outer.inner.size is True, not an integer"),
        ({"inner": {"name": "n", "size": 1 << 63}}, r"Outer.inner.size is 9223372036854775808, not an integer of 64 bits"),
        ({**GOOD, "kind": "c"}, r"Outer.kind is 'c', not one of 'a', 'b'"),
        ({**GOOD, "kind": []}, r"Outer.kind is \[\]"),
        ({**GOOD, "share": "1"}, r"Outer.share is '1'"),
        ({**GOOD, "share": -1}, r"Outer is invalid: it is negative"),
        ({**GOOD, "pair": ["y"]}, r"Outer.pair is \['y'\], not a list of 2"),
        ({**GOOD, "pair": ["y", "z"]}, r"Outer.pair\[1\] is 'z'"),
        ({**GOOD, "rows": [{"name": "r"}, {}]}, r"Outer.rows\[1\].name is missing"),
        ({**GOOD, "names": "abc"}, r"Outer.names is 'abc', not a list"),
        ({**GOOD, "sizes": {"k": "1"}}, r"Outer.sizes\['k'\] is '1'"),
        ({**GOOD, "sizes": {1: 1}}, r"Outer.sizes\[1\] is 1, not str"),
        ({**GOOD, "other": 3}, r"Outer.other is 3, not a mapping"),
        ({**GOOD, "inner": {"name": 10**5000}}, r"Outer.inner.name is a int, not str"),
    ],
)
def test_a_malformed_field_is_named_in_the_error(data: object, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        decode(Outer, data)
