"""Attributes of objects of any class that a save looks for."""

from __future__ import annotations

import pytest

from ckpt.errors import UnsupportedLeaf
from ckpt.state.stateful import get_attribute


class _Failing:
    """Has no attributes; looking for one raises `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> object:
        raise self._error


def test_any_error_of_the_object_counts_as_a_missing_attribute() -> None:
    assert get_attribute(_Failing(KeyError("state_dict")), "state_dict") is None


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), OSError(24, "Too many open files")])
def test_an_error_that_may_be_temporary_does_not(error: Exception) -> None:
    """Otherwise the object counts as one without a state."""
    with pytest.raises(type(error)):
        get_attribute(_Failing(error), "state_dict")


def test_an_attribute_of_the_class_that_cannot_be_read_is_named() -> None:
    class Broken:
        @property
        def state_dict(self) -> object:
            raise KeyError("gone")

    with pytest.raises(UnsupportedLeaf, match="the state_dict of a .*Broken cannot be read"):
        get_attribute(Broken(), "state_dict")
