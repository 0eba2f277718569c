"""Two clients rename, delete, repair and write the same path at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.damaged_namespaces import write_newer_record
from helpers.races import FIRST, SECOND, Down, replace_registers
from helpers.races import collect_orphans_at_once as collect_orphans_at_once
from helpers.races import open_client as open_client

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.interfaces.folders import move_folder
from ckpt.aggregator.maintenance import repair, scrub
from ckpt.aggregator.maintenance.rebalance import drain_member
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.storage.base.errors import AlreadyExists, Changed, InvalidName, NotFound, StoreError, Unavailable
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.testing import random_bytes


def test_a_delete_after_a_rename_that_a_member_missed_deletes_nothing(open_client: Callable[[], Namespace]) -> None:
    one, other = open_client(), open_client()
    one.put("x", FIRST)
    replace_registers(other, one.ring.replica_set("/x").members[0], Down())
    other.rename("x", "y")
    assert not one.delete(["x"])
    assert one.get("y") == FIRST


@pytest.mark.parametrize("has_mark", [False, True])
def test_a_file_written_at_the_old_name_of_a_moved_folder_stays(open_client: Callable[[], Namespace], has_mark: bool) -> None:
    """Another client removes the folder, which is empty for a moment, and writes a file of its name."""
    one, other = open_client(), open_client()
    if has_mark:
        one.make_folder("old")
        one.make_folder("old/sub")
    one.put("old/x", FIRST)

    def rename_and_replace(old: str, new: str) -> None:
        one.rename(old, new)
        for path in ("old", "old/sub") if has_mark else ("old",):
            other.delete([path])
            other.put(path, SECOND)

    move_folder(one, "old", "new", rename_and_replace)
    assert one.get("new/x") == FIRST
    assert one.get("old") == SECOND
    assert not has_mark or one.get("old/sub") == SECOND


def test_a_file_renamed_twice_at_once_is_readable_by_both_names(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = open_client(), open_client()
    one.put("x", FIRST)
    publish = one.publish

    def rename_first(*args: Any, **options: Any) -> None:
        other.rename("x", "c")
        publish(*args, **options)

    monkeypatch.setattr(one, "publish", rename_first)
    one.rename("x", "b")
    monkeypatch.undo()
    assert one.get("b") == one.get("c") == FIRST
    one.delete(["b"])
    assert one.get("c") == FIRST


def test_a_second_rename_after_an_interrupted_one_loses_no_data(
    open_client: Callable[[], Namespace], collect_orphans_at_once: None
) -> None:
    one = open_client()
    one.put("q", FIRST)
    set_failpoints("namespace.renamed=error")
    with pytest.raises(OSError, match="injected"):
        one.rename("q", "r")
    set_failpoints("")
    one.rename("q", "s")
    one.delete(["s"])
    assert one.get("r") == FIRST
    repair.repair_namespace(one, scrub.scrub_namespace(one))
    assert one.get("r") == FIRST
    one.delete(["r"])
    repair.repair_namespace(one, scrub.scrub_namespace(one))
    assert not any(member.inventory() for member in one.open_members.values())


@pytest.mark.parametrize("point", ["namespace.rename", "namespace.renamed"])
def test_a_rename_of_a_file_that_was_drained_and_repaired_meanwhile_loses_no_data(
    open_client: Callable[[], Namespace], collect_orphans_at_once: None, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The repair deletes the objects that the drain has replaced. The path has the same version and token as before."""
    one, other = open_client(), open_client()
    one.put("x", FIRST)

    def move_once(name: str) -> None:
        if name != point:
            return
        file = other.stat("x")
        assert file is not None
        assert file.layout is not None
        for member in {o.member for o in file.layout.objects}:
            other.locations = tuple(each for each in other.locations if each.name != member)
        for member in {o.member for o in file.layout.objects}:
            drain_member(other, member)
        repair.repair_namespace(other, scrub.scrub_namespace(other))
        moved = other.stat("x")
        assert moved is not None
        assert moved.layout is not None
        assert not set(moved.layout.objects) & set(file.layout.objects)

    monkeypatch.setattr("ckpt.aggregator.file_io.namespace.failpoint", move_once)
    one.rename("x", "y")
    monkeypatch.undo()
    client = open_client()
    assert client.stat("x") is None
    assert client.get("y") == FIRST
    repair.repair_namespace(client, scrub.scrub_namespace(client))
    assert client.get("y") == FIRST


def test_a_refused_rename_does_not_mark_the_file(open_client: Callable[[], Namespace]) -> None:
    """The objects of a marked file stay until a repair when it is replaced."""
    one = open_client()
    one.put("x", FIRST)
    one.make_folder("folder")
    with pytest.raises(AlreadyExists, match="folder in ckpt://test: a folder of this name exists already"):
        one.rename("x", "folder")
    with pytest.raises(InvalidName):
        one.rename("x", "a//b")
    with pytest.raises(InvalidName):
        one.rename("missing", "a//b")
    file = one.stat("x")
    assert file is not None
    assert not file.rename_token
    one.put("x", b"small")
    assert not any(member.inventory() for member in one.open_members.values())


def test_a_repair_of_a_file_renamed_meanwhile_loses_no_data(open_client: Callable[[], Namespace]) -> None:
    one = open_client()
    one.put("x", FIRST)
    file = one.stat("x")
    assert file is not None
    assert file.layout is not None
    holder = file.layout.objects[0]
    one.open_members[holder.member].store.delete([holder.name])
    found = scrub.scrub_namespace(one)
    one.rename("x", "y")
    repair.repair_namespace(one, found)
    assert one.get("y") == FIRST


def test_a_repair_after_a_scrub_during_a_rename_loses_no_data(
    open_client: Callable[[], Namespace], collect_orphans_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = open_client()
    one.put("z", FIRST)
    read = one.read_records

    def rename_first(names: Any) -> Any:
        monkeypatch.undo()
        one.rename("z", "a")
        return read(names)

    monkeypatch.setattr(one, "read_records", rename_first)
    found = scrub.scrub_namespace(one)
    monkeypatch.setattr(scrub, "GRACE_SECONDS", -60.0)
    repair.repair_namespace(one, found)
    assert one.get("a") == FIRST


@pytest.mark.parametrize("renames", [2, 5, 1000])
def test_a_file_that_is_renamed_during_each_listing_loses_no_data(
    open_client: Callable[[], Namespace], collect_orphans_at_once: None, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Its new name is not in the listing, and its old one is deleted when its record is read: no record names its objects."""
    one, other = open_client(), open_client()
    one.put("x", FIRST)
    torn = one.create("torn")
    torn.append(memoryview(SECOND))
    torn._commit_objects()
    monkeypatch.setattr(scrub, "GRACE_SECONDS", -60.0)
    found = scrub.scrub_namespace(one)
    assert found.orphans
    names = ["x"]
    scan = one.scan

    def rename_after_the_listing(*args: Any, **options: Any) -> Any:
        answer = scan(*args, **options)
        if len(names) <= renames:
            other.rename(names[-1], f"x{len(names)}")
            names.append(f"x{len(names)}")
        return answer

    monkeypatch.setattr(one, "scan", rename_after_the_listing)
    orphans = repair.repair_namespace(one, found).orphans
    assert other.get(names[-1]) == FIRST
    if renames < 1000:  # else no listing is complete, so nothing is deleted
        repaired = repair.repair_namespace(one, scrub.scrub_namespace(one)).orphans
        assert orphans + repaired == sum(map(len, found.orphans.values())), "the objects of the torn file are deleted"
    else:
        assert not orphans


def test_a_scrub_deletes_no_objects_while_it_cannot_read_a_record(
    open_client: Callable[[], Namespace], collect_orphans_at_once: None
) -> None:
    """The record is of a newer version, so the objects that it names are unknown: none counts as an orphan."""
    one = open_client()
    one.put("n", FIRST)
    write_newer_record(one, "n")
    found = scrub.scrub_namespace(one)
    assert list(found.unreadable_paths) == ["n"]
    assert not found.orphans
    assert not found.is_whole


def test_a_partial_write_on_an_absent_member_is_settled_for_good(
    open_client: Callable[[], Namespace], collect_orphans_at_once: None
) -> None:
    """Its only trace is on a member that does not answer while the others are scrubbed."""
    one, other = open_client(), open_client()
    one.put("x", FIRST)
    members = one.ring.replica_set("/x").members
    for member in members[1:]:
        replace_registers(other, member, Down())
    with pytest.raises(Unavailable):
        other.put("x", SECOND)
    registers = replace_registers(one, members[0], Down())
    assert one.get("x") == FIRST
    repair.repair_namespace(one, scrub.scrub_namespace(one))
    assert one.get("x") == FIRST
    replace_registers(one, members[0], registers)
    fresh = open_client()
    found = fresh.get("x")
    assert found in (FIRST, SECOND)
    repair.repair_namespace(fresh, scrub.scrub_namespace(fresh))
    assert fresh.get("x") == found


@pytest.mark.parametrize("size", [1000, 300_000])
def test_an_append_to_a_changed_file_is_refused(open_client: Callable[[], Namespace], size: int) -> None:
    one = open_client()
    more = memoryview(b"more" * 20_000)
    changes: list[Callable[[str], object]] = [
        lambda path: one.put(path, SECOND), lambda path: one.rename(path, f"{path}-renamed"), lambda path: one.delete([path]),
    ]  # fmt: skip
    for number, change in enumerate(changes):
        path = f"x{number}"
        one.put(path, FIRST[:size])
        with one.create(path, aligned=False, base=one.stat(path)) as writer:
            writer.append(more)
            change(path)
            with pytest.raises(Changed, match="nothing was added, try again"):
                writer.commit()
    assert one.get("x0") == SECOND
    assert one.get("x1-renamed") == FIRST[:size]
    with pytest.raises(NotFound):
        one.get("x2")
    one.put("both", FIRST[:size])
    base = one.stat("both")
    for i in range(2):
        with one.create("both", aligned=False, base=base) as writer:
            writer.append(more)
            if i:
                with pytest.raises(Changed):
                    writer.commit()
            else:
                writer.commit()
    assert one.get("both") == FIRST[:size] + bytes(more)


@pytest.mark.parametrize(
    ("others", "size", "recognised"), [(3, 40_000, True), (9, 40_000, True), (3, 100, True), (9, 100, False)]
)
def test_a_stopped_writer_recognises_its_append_by_its_objects(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch, others: int, size: int, recognised: bool
) -> None:
    """Other clients completed the append and then added so often that the record no longer has its version. The objects of the
    append show that it succeeded; without objects the writer can't know whether it was refused."""
    one, other = open_client(), open_client()
    first, second = FIRST[:size], SECOND[:size]
    one.put("log", first)
    stopped, resume = threading.Event(), threading.Event()

    def stop_once(name: str) -> None:
        if name == "register.changed" and threading.current_thread() is writer and not stopped.is_set():
            stopped.set()
            assert resume.wait(600)

    outcome: list[object] = []

    def write() -> None:
        try:
            with one.create("log", aligned=False, base=one.stat("log")) as writing:
                writing.append(memoryview(second))
                writing.commit()
            outcome.append("added")
        except StoreError as error:
            outcome.append(error)

    writer = threading.Thread(target=write)
    monkeypatch.setattr("ckpt.aggregator.records.paxos.failpoint", stop_once)
    writer.start()
    assert stopped.wait(600)
    other.settle(["/log"])
    for i in range(others):
        with other.create("log", aligned=False, base=other.stat("log")) as writing:
            writing.append(memoryview(bytes([i]) * size))
            writing.commit()
    resume.set()
    writer.join()
    if recognised:
        assert outcome == ["added"]
    else:
        assert isinstance(outcome[0], Unavailable), outcome
        assert "it can't be known whether this was added" in str(outcome[0])
    assert open_client().get("log") == first + second + b"".join(bytes([i]) * size for i in range(others))


def test_an_append_to_an_erasure_coded_file_is_read_back(open_client: Callable[[], Namespace]) -> None:
    one = open_client()
    one.put("e", FIRST, redundancy=parse_redundancy("4+2"))
    with one.create("e", aligned=False, base=one.stat("e")) as writer:
        writer.append(memoryview(SECOND))
        writer.commit()
    assert one.get("e") == FIRST + SECOND


@pytest.mark.parametrize("redundancy", ["2x", "3+2"])
@pytest.mark.parametrize("how", ["repair", "drain"])
def test_an_append_to_a_file_that_was_moved_meanwhile_is_read_back(
    open_client: Callable[[], Namespace], monkeypatch: pytest.MonkeyPatch, redundancy: str, how: str
) -> None:
    """A repair or a drain moves stripes of the file while a client appends to it."""
    one, other = open_client(), open_client()
    one.put("x", FIRST, redundancy=parse_redundancy(redundancy))
    base = one.stat("x")
    assert base is not None
    assert base.layout is not None
    with one.create("x", aligned=False, base=base) as writer:
        writer.append(memoryview(SECOND))
        lost = base.layout.objects[0]
        if how == "repair":
            other.open_members[lost.member].store.delete([lost.name])
            assert repair.repair_namespace(other, scrub.scrub_namespace(other)).files == 1
        else:
            other.locations = tuple(s for s in other.locations if s.name != lost.member)
            assert drain_member(other, lost.member).files == 1
        moved = other.stat("x")
        assert moved is not None
        assert moved.layout != base.layout
        published = writer.publish()
    assert open_client().get("x") == FIRST + SECOND
    assert published == one.stat("x")
    assert published.layout is not None
    assert lost not in published.layout.objects
    with one.create("x", aligned=False, base=published) as writer:
        writer.append(memoryview(b"more"))
        writer.commit()
    assert one.get("x") == FIRST + SECOND + b"more"
    monkeypatch.setattr(scrub, "GRACE_SECONDS", -60.0)
    found = scrub.scrub_namespace(open_client(), verify=True)
    assert (found.damaged_files, found.orphans) == ([], {})


@pytest.mark.parametrize("redundancy", ["2x", "4+2"])
def test_an_append_to_a_truncated_file_is_read_back(open_client: Callable[[], Namespace], redundancy: str) -> None:
    one = open_client()
    whole = random_bytes(8 << 20)
    with one.create("c", parse_redundancy(redundancy), aligned=False) as writer:
        writer.write_at(0, memoryview(whole))
        writer.truncate(5 << 20)
        writer.commit()
    assert one.get("c") == whole[: 5 << 20]
    with one.create("c", aligned=False, base=one.stat("c")) as writer:
        writer.append(memoryview(b"N" * 1000))
        writer.commit()
    assert one.get("c") == whole[: 5 << 20] + b"N" * 1000
