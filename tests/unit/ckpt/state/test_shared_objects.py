"""Leaves of one state share objects that are made once for all of them."""

from __future__ import annotations

import pytest

from ckpt.state.leaves.shared_objects import leaves_of_one_state, shared_object


class Shared:
    calls = 0

    def leaves_are_made(self) -> None:
        self.calls += 1


def test_leaves_share_an_object_until_their_state_is_complete() -> None:
    assert shared_object("a", Shared) is not shared_object("a", Shared)
    with leaves_of_one_state():
        first = shared_object("a", Shared)
        with leaves_of_one_state():  # a state inside of a state, as of an object that is flattened alone
            inner = shared_object("a", Shared)
        assert shared_object("a", Shared) is first
        assert shared_object("b", Shared) is not first
        assert inner is not first
        assert (inner.calls, first.calls) == (1, 0)
    assert first.calls == 1
    assert shared_object("a", Shared) is not first


def test_nothing_is_shared_after_an_error() -> None:
    with pytest.raises(KeyError), leaves_of_one_state():
        first = shared_object("a", Shared)
        raise KeyError
    assert first.calls == 0
    assert shared_object("a", Shared) is not first
