"""A change that some members have accepted, while the others lack it.

If a change that has reached only the first member were reported as refused, a later client could still find it on that member,
and complete it. A listing agrees with a later read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from helpers.nodes import directories
from helpers.processes import until
from helpers.replica_sets import locations_of, make_three_member_namespace

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records.file_record import decode_record
from ckpt.aggregator.records.ring_change import change_ring
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.registers.base import Register


def half_written(folder: Path) -> tuple[Namespace, str]:
    """Return a namespace in which only one member has the record of the file x, and the name of this member."""
    namespace = Namespace(directories(folder, 3, redundancy="2x", deadline_seconds=60.0))
    namespace.put("x", b"first")
    first, *others = members = namespace.ring.replica_set("/x").members
    until(lambda: all(namespace.open_members[m].registers.read(["/x"]) != [Register()] for m in members), "x on each member")
    for member in others:
        with sqlite3.connect(folder / member / "registers.sqlite") as db:
            db.execute("DELETE FROM registers WHERE name = '/x'")
        db.close()
    return namespace, first


def refuse(*_: object, **__: object) -> NoReturn:
    """Answer no call."""
    raise Unavailable("the member does not answer")


def hide_from_second_phase(namespace: Namespace, member: str) -> Callable[[], None]:
    """Let a member not answer the first phase of a consensus round. Return what makes it answer again."""
    registers = namespace.open_members[member].registers
    prepare = registers.prepare
    registers.prepare = refuse  # type: ignore[method-assign]

    def answer() -> None:
        registers.prepare = prepare  # type: ignore[method-assign]

    return answer


def test_a_deletion_that_one_member_accepted_is_done(tmp_path: Path) -> None:
    namespace, first = half_written(tmp_path)
    answer = hide_from_second_phase(namespace, first)
    assert namespace.delete(["x"]), "a deletion that may take place is not reported as one of a missing file"
    answer()
    assert namespace.stat("x") is None
    namespace.put("x", b"again", new=True)
    assert namespace.get("x") == b"again"
    namespace.close()


def test_an_append_that_one_member_accepted_is_done(tmp_path: Path) -> None:
    namespace, first = half_written(tmp_path)
    (value,) = namespace.open_members[first].registers.read(["/x"])
    assert isinstance(value, Register)
    assert value.value is not None
    answer = hide_from_second_phase(namespace, first)
    with namespace.create("x", aligned=False, base=decode_record("x", value.value)) as writer:
        writer.append(memoryview(b" and more"))
        writer.commit()
    answer()
    assert namespace.get("x") == b"first and more"
    namespace.close()


def test_a_listing_shows_no_change_that_only_the_new_members_of_a_moving_ring_accepted(tmp_path: Path) -> None:
    """A client that deletes one file and writes another one stops when each has reached only the new members."""
    make_three_member_namespace(tmp_path, 6)
    mover, writer, reader = (Namespace(directories(tmp_path, 6, deadline_seconds=2.0)) for _ in range(3))
    set_failpoints("ring.fenced=error")
    with pytest.raises(OSError, match="injected"):
        change_ring(mover, locations_of(mover, 3, 4, 5))  # type: ignore[arg-type]
    set_failpoints("")
    for member in ("disk0", "disk1", "disk2"):
        writer.open_members[member].registers.accept = refuse  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        writer.delete(["many/1"])
    with pytest.raises(Unavailable):
        writer.put("many/new", b"")
    listed = reader.list("many")
    assert "many/1" in listed
    assert "many/new" not in listed
    assert reader.get("many/1") == b"1"
    assert reader.stat("many/new") is None
    for namespace in (mover, writer, reader):
        namespace.close()
