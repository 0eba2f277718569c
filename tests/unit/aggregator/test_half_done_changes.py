"""A change that one member has accepted, while the others lack the record that it replaces.

The writer of the file has reached only the first member. If the change were reported as refused, a later client could still
find it on that member, and complete it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from helpers.nodes import directories
from helpers.processes import until

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records.file_record import decode_record
from ckpt.storage.base.errors import Unavailable
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


def hide_from_second_phase(namespace: Namespace, member: str) -> Callable[[], None]:
    """Let a member not answer the first phase of a consensus round. Return what makes it answer again."""
    registers = namespace.open_members[member].registers
    prepare = registers.prepare

    def refuse(*_: object) -> None:
        raise Unavailable(f"{member} does not answer")

    registers.prepare = refuse  # type: ignore[assignment,method-assign]

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
