"""A client is stopped while it puts, deletes or renames a file. Others complete its change, and change the path too often for
the record to list its version."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from helpers.races import FIRST, SECOND, Down, replace_registers
from helpers.races import open_client as open_client

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records.eras import begin_era
from ckpt.aggregator.records.tombstone_collection import collect_tombstones
from ckpt.storage.base.errors import AlreadyExists, Outdated, StoreError, Unavailable
from ckpt.storage.base.failpoints import set_failpoints


def run_stopped(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], meanwhile: Callable[[], object]) -> object:
    """Run a call in a thread, stop it after the first member has changed its record, and continue it after `meanwhile`.

    Return its result or its error.
    """
    stopped, resume = threading.Event(), threading.Event()
    outcome: list[object] = []

    def stop_once(name: str) -> None:
        if name == "register.changed" and threading.current_thread() is thread and not stopped.is_set():
            stopped.set()
            assert resume.wait(600)

    def run() -> None:
        try:
            outcome.append(call())
        except StoreError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    monkeypatch.setattr("ckpt.aggregator.records.paxos.failpoint", stop_once)
    thread.start()
    assert stopped.wait(600)
    try:
        meanwhile()
    finally:
        resume.set()
        thread.join()
    monkeypatch.undo()
    return outcome[0]


@pytest.mark.parametrize("is_fenced", [False, True])
@pytest.mark.parametrize("size", [100, 40_000])
@pytest.mark.parametrize("condition", ["none", "new", "replaces"])
def test_a_stopped_put_that_others_replaced_often_is_not_published_again(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch, condition: str, size: int, is_fenced: bool
) -> None:
    one, other = open_client(), open_client()
    replaces = None if condition == "new" else one.put("log", FIRST[:size]).head.version

    def put() -> object:
        return one.put("log", SECOND[:size], condition == "new", replaces=replaces if condition == "replaces" else None)

    def overwrite() -> None:
        other.settle(["/log"])
        assert other.get("log") == SECOND[:size]
        for i in range(9):
            other.put("log", bytes([i]) * size)
        if is_fenced:
            assert begin_era(other) is not None

    error = run_stopped(monkeypatch, put, overwrite)
    assert open_client().get("log") == bytes([8]) * size
    assert isinstance(error, Unavailable), error
    assert "it can't be known whether it was published" in str(error)


def test_a_stopped_put_that_others_replaced_few_times_is_recognised(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = open_client(), open_client()

    def overwrite() -> None:
        other.settle(["/log"])
        for i in range(3):
            other.put("log", bytes([i]) * 40_000)

    written = run_stopped(monkeypatch, lambda: one.put("log", FIRST), overwrite)
    assert not isinstance(written, StoreError), written
    assert open_client().get("log") == bytes([2]) * 40_000


def test_a_new_file_is_refused_or_written_where_the_path_was_replaced_often(open_client: Callable[[], Namespace]) -> None:
    """The writer of a new file proposes its record before it has read any. No member accepts this proposal."""
    one = open_client()
    for i in range(12):
        one.put("log", bytes([i]))
    with pytest.raises(AlreadyExists, match="a file of this name exists already"):
        one.put("log", FIRST, new=True)
    assert one.delete(["log"]) == ["log"]
    one.put("log", FIRST, new=True)
    assert one.get("log") == FIRST


def test_a_member_that_missed_many_records_does_not_fail_the_next_put(open_client: Callable[[], Namespace]) -> None:
    """The first member has a full history that lacks all versions of the others, and would accept a change of its record."""
    one, other = open_client(), open_client()
    for i in range(12):
        one.put("log", bytes([i]))
    replace_registers(other, one.ring.replica_set("/log").members[0], Down())
    for i in range(12):
        other.put("log", bytes([i]))
    one.put("log", FIRST)
    assert one.get("log") == FIRST


def fence_after_a_quorum_accepted(monkeypatch: pytest.MonkeyPatch, client: Namespace, first_member: str) -> None:
    """Let the next change of a client reach all members but the first one, and then let it be refused as outdated once."""
    registers = client.open_members[first_member].registers
    is_done = False

    def fence_once(name: str) -> None:
        nonlocal is_done
        if name == "register.change" and not is_done:
            replace_registers(client, first_member, Down())
        if name == "register.accepted" and not is_done:
            is_done = True
            replace_registers(client, first_member, registers)
            client.fan_out.health.record_answer(first_member)
            raise Outdated("a new era begins")

    monkeypatch.setattr("ckpt.aggregator.records.paxos.failpoint", fence_once)


def test_a_put_after_a_rename_that_a_member_missed_keeps_the_objects_of_the_new_name(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer replaces the tombstone, and is fenced before it knows. Then it reads the file from an outdated member."""
    one, other = open_client(), open_client()
    one.put("x", FIRST)
    first_member = one.ring.replica_set("/x").members[0]
    replace_registers(other, first_member, Down())
    other.rename("x", "y")
    fence_after_a_quorum_accepted(monkeypatch, one, first_member)
    one.put("x", SECOND)
    monkeypatch.undo()
    assert open_client().get("x") == SECOND
    assert open_client().get("y") == FIRST


@pytest.mark.parametrize("size", [100, 40_000])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_stopped_put_whose_tombstone_was_collected_does_not_replace_a_later_file(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch, is_new: bool, size: int
) -> None:
    """The later file has no history, as the tombstone before it is forgotten."""
    one, other = open_client(), open_client()

    def replace_file() -> None:
        other.settle(["/x"])
        assert other.delete(["x"]) == ["x"]
        assert collect_tombstones(other, age_seconds=-60.0) == 1
        other.put("x", SECOND[:size])

    one.put("other", b"")
    error = run_stopped(monkeypatch, lambda: one.put("x", FIRST[:size], new=is_new), replace_file)
    assert open_client().get("x") == SECOND[:size]
    assert isinstance(error, Unavailable), error
    assert "it can't be known whether it was published" in str(error)


@pytest.mark.parametrize("is_collected", [False, True])
def test_a_stopped_delete_does_not_delete_a_later_file(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch, is_collected: bool
) -> None:
    """Others complete the deletion, and write the path so often, or collect the tombstone, that its record does not list it."""
    one, other = open_client(), open_client()
    one.put("x", FIRST)
    one.put("y", FIRST)

    def write_again() -> None:
        other.settle(["/x"])
        assert other.stat("x") is None
        if is_collected:
            assert collect_tombstones(other, age_seconds=-60.0) > 0
        other.put("x", b"", new=True)
        for i in range(1 if is_collected else 9):
            other.put("x", bytes([i]) * 40_000)

    error = run_stopped(monkeypatch, lambda: one.delete(["x", "y"]), write_again)
    assert open_client().get("x") == bytes([0 if is_collected else 8]) * 40_000
    assert open_client().stat("y") is None
    assert isinstance(error, Unavailable), error
    assert "x in ckpt://test: it can't be known whether it was deleted" in str(error)


def test_a_delete_removes_a_file_of_which_a_member_missed_many_records(open_client: Callable[[], Namespace]) -> None:
    one, other = open_client(), open_client()
    for i in range(12):
        one.put("x", bytes([i]) * 40_000)
    replace_registers(other, one.ring.replica_set("/x").members[0], Down())
    for i in range(12):
        other.put("x", bytes([i]) * 40_000)
    assert one.delete(["x", "missing"]) == ["x"]
    assert open_client().stat("x") is None


def test_a_delete_after_a_rename_that_a_member_missed_keeps_the_objects_of_the_new_name(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quorum deletes a later file of the path. Then the client reads the renamed file from an outdated member."""
    one, other = open_client(), open_client()
    one.put("x", FIRST)
    first_member = one.ring.replica_set("/x").members[0]
    replace_registers(other, first_member, Down())
    other.rename("x", "y")
    other.put("x", SECOND)
    fence_after_a_quorum_accepted(monkeypatch, one, first_member)
    assert one.delete(["x"]) == ["x"]
    monkeypatch.undo()
    assert open_client().stat("x") is None
    assert open_client().get("y") == FIRST


def test_a_delete_after_an_interrupted_rename_that_a_member_missed_keeps_the_objects_of_the_new_name(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outdated member has the same version without the rename token."""
    one, other = open_client(), open_client()
    one.put("x", FIRST)
    first_member = one.ring.replica_set("/x").members[0]
    replace_registers(other, first_member, Down())
    set_failpoints("namespace.renamed=error")
    with pytest.raises(OSError, match="injected"):
        other.rename("x", "y")
    set_failpoints("")
    fence_after_a_quorum_accepted(monkeypatch, one, first_member)
    assert one.delete(["x"]) == ["x"]
    monkeypatch.undo()
    assert open_client().stat("x") is None
    assert open_client().get("y") == FIRST
