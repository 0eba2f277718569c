"""The registers of a storage node in this process, over the wire."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.node_fixtures import local_node as local_node
from helpers.node_fixtures import store as store
from helpers.nodes import LocalNode

from ckpt.storage.base.errors import Outdated, StoreError
from ckpt.storage.node.client import NodeStore
from ckpt.storage.registers.base import NO_BALLOT, DirectChange, RegisterValue


def test_a_listing_of_registers_with_a_negative_limit_is_empty(store: NodeStore) -> None:
    store.registers.learn("a", RegisterValue(b"head"))
    assert store.call("registers.scan", "", "", 1, 0)[0] == ["a"]
    assert store.call("registers.scan", "", "", -1, 0)[0] == []


def test_changes_of_which_a_part_was_made_before_a_fence_are_not_refused_as_outdated(
    local_node: LocalNode, store: NodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large records take several calls. `Outdated` means that nothing was changed."""
    registers = local_node.device.registers
    registers.mark_complete()
    change = registers.change

    def change_and_fence(*arguments: Any, **options: Any) -> list[bool]:
        done = change(*arguments, **options)
        registers.fence(2)
        return done

    monkeypatch.setattr(registers, "change", change_and_fence)
    changes = [DirectChange(name, NO_BALLOT, RegisterValue(b"", bytes(10 << 20))) for name in ("/a", "/b")]
    with pytest.raises(StoreError, match="some registers may have been changed: .*ring 2, and the call has ring 1") as error:
        store.registers.change(changes, "w", 1)
    assert not isinstance(error.value, Outdated)
    assert [name for name, _ in registers.scan("/")] == ["/a"]
    with pytest.raises(Outdated):
        store.registers.change(changes[1:], "w", 1)
