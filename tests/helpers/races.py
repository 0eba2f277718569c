"""Two clients that change one path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import scrub
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.registers.base import Registers
from ckpt.storage.testing import random_bytes
from helpers.nodes import directories

FIRST, SECOND = random_bytes(300_000, 1), random_bytes(300_000, 2)


class Down(Registers):
    """Registers of a member that does not answer."""

    def _fails(self, *args: Any, **options: Any) -> Any:
        raise Unavailable("down")

    read = prepare = accept = change = scan = reset = mark_complete = fence = learn = join_ring = drop = collect = _fails


@pytest.fixture
def open_client(tmp_path: Path) -> Iterator[Callable[..., Namespace]]:
    """Yield a function that opens another client of the same six directories.

    Its argument is the deadline of the members in seconds: 2 for tests with silent members, more for a slow disk.
    """
    made: list[Namespace] = []

    def open_it(deadline_seconds: float = 2.0) -> Namespace:
        made.append(Namespace(directories(tmp_path, 6, deadline_seconds=deadline_seconds)))
        assert made[-1].ring
        return made[-1]

    yield open_it
    for namespace in made:
        namespace.close()


@pytest.fixture
def collect_orphans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let orphaned objects be collected at once."""
    monkeypatch.setattr(scrub, "GRACE_SECONDS", -60.0)


def replace_registers(namespace: Namespace, member: str, registers: Registers) -> Registers:
    """Replace the registers of a member, and return the former ones."""
    before = namespace._member_registers[member]
    namespace._member_registers[member] = namespace.open_members[member].registers = registers
    return before
