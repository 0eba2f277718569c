"""Scrub of a namespace: what it finds, what it costs, and what it does not change."""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from helpers.damaged_namespaces import assert_whole, content, damage_record, filled_namespace, large_file
from helpers.nodes import directories
from helpers.registers import Flaky
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.cluster import fanout
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import all_records, repair, scrub
from ckpt.aggregator.records.file_record import fragment_bytes
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.registers.base import DamagedRegister, Register
from ckpt.storage.testing import random_bytes


def test_a_scrub_that_verifies_finds_rot(tmp_path: Path) -> None:
    namespace = filled_namespace(tmp_path, "2x", 4)
    file = large_file(namespace)
    assert file.layout is not None
    holder = file.layout.objects[0]
    victim = tmp_path / holder.member / "objects" / holder.name
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
    require_whole(namespace)  # inventories do not show rot
    found = scrub.scrub_namespace(namespace, verify=True)
    assert [(f.path, f.state, f.damaged_objects) for f in found.damaged_files] == [
        ("d/f4", "endangered", ((holder.member, holder.name),))
    ]
    assert not repair.repair_namespace(namespace, found).failed
    assert_whole(namespace, "2x")
    assert not victim.exists()
    (aside,) = (tmp_path / holder.member / "quarantine").iterdir()
    assert aside.read_bytes() == raw, "the damaged object is kept for a later examination"
    namespace.close()


def test_a_lost_file_is_reported_and_keeps_its_record(tmp_path: Path) -> None:
    namespace = filled_namespace(tmp_path, "2x", 4)
    file = large_file(namespace)
    assert file.layout is not None
    for holder in file.layout.objects:
        (tmp_path / holder.member / "objects" / holder.name).unlink()
    found = scrub.scrub_namespace(namespace)
    assert [(f.path, f.state) for f in found.lost_files] == [("d/f4", "lost")]
    done = repair.repair_namespace(namespace, found)
    assert list(done.failed) == ["d/f4"]
    assert scrub.scrub_namespace(namespace).lost_files, "its record stays: the members may return"
    namespace.close()


def test_a_scrub_that_could_not_check_all_bytes_is_not_whole(tmp_path: Path) -> None:
    namespace = Namespace(directories(tmp_path, 4))
    for i in range(20):
        namespace.put(f"f{i}", random_bytes(50_000, i))

    def lose(nbytes: int) -> None:
        for folder in tmp_path.glob("disk*/objects/*"):
            shutil.rmtree(folder, ignore_errors=True)

    found = scrub.scrub_namespace(namespace, True, lose)
    assert found.unchecked_bytes > 0
    assert (found.missing_members, found.damaged_files) == ({}, []), "they existed when it began"
    assert not found.is_whole


def test_bytes_whose_record_cannot_be_read_during_a_scrub_count_as_unchecked(tmp_path: Path) -> None:
    """The objects vanish, and no member answers whether a record still names them."""
    namespace = Namespace(directories(tmp_path, 4))
    for i in range(20):
        namespace.put(f"f{i}", random_bytes(50_000, i))
    layouts = [file.layout for i in range(20) if (file := namespace.stat(f"f{i}")) is not None]
    stored_bytes = sum(fragment_bytes(50_000, layout.redundancy) * len(layout.objects) for layout in layouts if layout)
    lock, verified = threading.Lock(), [0]

    def lose(nbytes: int) -> None:
        with lock:
            verified[0] += nbytes
            for folder in tmp_path.glob("disk*/objects/*"):
                shutil.rmtree(folder, ignore_errors=True)
            for name, member in namespace.open_members.items():
                member.registers = namespace._member_registers[name] = Flaky(member.registers, random.Random(0), 1.0)

    found = scrub.scrub_namespace(namespace, True, lose)
    assert 0 < verified[0] < stored_bytes
    assert verified[0] + found.unchecked_bytes == stored_bytes
    assert not found.is_whole
    namespace.close()


def test_the_bytes_of_a_member_with_too_many_unanswered_calls_count_as_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its check does not even begin."""
    monkeypatch.setattr(fanout, "_SLOW_CALL_SECONDS", -1.0)  # calls count as unanswered at once
    namespace = Namespace(directories(tmp_path, 4))
    namespace.put("file", random_bytes(50_000))
    file = namespace.stat("file")
    assert file is not None
    assert file.layout is not None
    member, answered = file.layout.objects[0].member, threading.Event()
    fan_out = namespace.member_io.read_fan_out
    calls = [fan_out.submit(member, answered.wait) for _ in range(fan_out._max_calls_per_member)]
    found = scrub.scrub_namespace(namespace, True)
    answered.set()
    assert all(call.result(600) for call in calls)
    assert found.unchecked_bytes == fragment_bytes(50_000, file.layout.redundancy)
    assert not found.is_whole
    namespace.close()


def test_files_deleted_during_a_scrub_do_not_count_as_unchecked(tmp_path: Path) -> None:
    namespace = filled_namespace(tmp_path, "2x")

    def delete(nbytes: int) -> None:
        namespace.delete(list(content()))

    assert scrub.scrub_namespace(namespace, True, delete).unchecked_bytes == 0


def test_probes_of_a_dropped_member_end_without_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = filled_namespace(tmp_path, "2x")
    health, broken = namespace.fan_out.health, []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    monkeypatch.setattr(health, "_first_pause_seconds", 0.0)
    health.record_failure("disk2", "it is lost")
    namespace.drop_member("disk2")
    while health.is_down("disk2") and not broken:
        time.sleep(0.01)
    assert not broken


def test_objects_of_a_dead_writer_are_deleted_after_the_grace_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept while the writer may be alive."""
    namespace = filled_namespace(tmp_path, "2x", 4)
    writer = namespace.create("torn")
    writer.append(memoryview(random_bytes(1 << 20)))
    writer._commit_objects()
    require_whole(namespace)
    monkeypatch.setattr(scrub, "GRACE_SECONDS", -10.0)
    found = scrub.scrub_namespace(namespace)
    assert sum(map(len, found.orphans.values())) == 2
    assert repair.repair_namespace(namespace, found).orphans == 2
    assert_whole(namespace, "2x")
    namespace.close()


def test_no_object_is_deleted_while_a_record_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the record that names the object. Once it is repaired, the object is deleted."""
    namespace = filled_namespace(tmp_path, "2x", 4)
    writer = namespace.create("torn")
    writer.append(memoryview(random_bytes(1 << 20)))
    writer._commit_objects()
    monkeypatch.setattr(scrub, "GRACE_SECONDS", -10.0)
    member = namespace.ring.replica_set("/d/f4").members[0]
    with sqlite3.connect(tmp_path / member / "registers.sqlite") as db:
        db.execute("UPDATE registers SET body = 'rot' WHERE name = '/d/f4'")
    db.close()
    found = scrub.scrub_namespace(namespace)
    assert found.lagging_paths == ["d/f4"]
    assert found.orphans == {}
    assert repair.repair_namespace(namespace, found).orphans == 2
    assert_whole(namespace, "2x")
    namespace.close()


@pytest.mark.slow
def test_deleted_files_do_not_return_with_an_absent_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that was absent still has the record and the objects: the tombstone wins, and the objects are deleted."""
    namespace = filled_namespace(tmp_path, "2x", 4)
    namespace.close()
    (tmp_path / "disk1").rename(tmp_path / "away")
    (tmp_path / "disk1").write_text("not mounted")
    left = Namespace(directories(tmp_path, 4))
    left.delete(["d/f3", "d/f4"])
    assert not any(p in left.list() for p in ("d/f3", "d/f4"))
    left.close()
    (tmp_path / "disk1").unlink()
    (tmp_path / "away").rename(tmp_path / "disk1")
    monkeypatch.setattr(scrub, "GRACE_SECONDS", -10.0)
    back = Namespace(directories(tmp_path, 4))
    for _ in range(2):
        found = scrub.scrub_namespace(back)
        assert not any(p in back.list() for p in ("d/f3", "d/f4"))
        repair.repair_namespace(back, found)
    require_whole(back)
    assert back.stat("d/f3") is None
    object_count = sum(len([p for p in (tmp_path / f"disk{i}" / "objects").rglob("*") if p.is_file()]) for i in range(4))
    file = back.stat("d/f2")
    assert file is not None
    assert file.layout is not None
    assert object_count == len(file.layout.objects), "no object of the deleted files is left"
    back.close()


@pytest.mark.slow
def test_records_of_a_damaged_register_file_are_restored(tmp_path: Path) -> None:
    """A whole register file is damaged: no object is deleted meanwhile, and the records are restored from the others."""
    namespace = filled_namespace(tmp_path, "2x", 4)
    namespace.close()
    file = tmp_path / "disk2" / "registers.sqlite"
    file.write_bytes(b"\xff" * file.stat().st_size)
    namespace = Namespace(directories(tmp_path, 4))
    for path, data in content().items():
        assert namespace.get(path) == data
    namespace.open_members["disk2"].registers.reset()
    assert isinstance(namespace.open_members["disk2"].registers.read(["/none"])[0], DamagedRegister), (
        "a damaged file must not report that a record is absent"
    )
    found = scrub.scrub_namespace(namespace)
    assert found.lagging_paths
    repair.repair_namespace(namespace, found)
    assert not scrub.scrub_namespace(namespace).lagging_paths
    assert isinstance(namespace.open_members["disk2"].registers.read(["/none"])[0], Register)
    assert_whole(namespace, "2x")
    namespace.close()


def test_a_record_that_reaches_a_member_during_the_scrub_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client returns when a quorum has its change. On a slow disk, the third member has it a moment later."""
    namespace = filled_namespace(tmp_path, "2x", 4)
    file = tmp_path / namespace.ring.replica_set("/d/f4").members[0] / "registers.sqlite"
    with sqlite3.connect(file) as db:
        row = db.execute("SELECT * FROM registers WHERE name = '/d/f4'").fetchone()
        db.execute("DELETE FROM registers WHERE name = '/d/f4'")
    db.close()
    waits = []

    def arrives_while_the_scrub_waits(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            with sqlite3.connect(file) as late:
                late.execute(f"INSERT INTO registers VALUES ({', '.join('?' * len(row))})", row)
            late.close()

    monkeypatch.setattr(all_records.time, "sleep", arrives_while_the_scrub_waits)
    require_whole(namespace)
    assert len(waits) == 2
    namespace.close()


@pytest.mark.slow
def test_a_repair_keeps_to_its_rate(tmp_path: Path) -> None:
    namespace = filled_namespace(tmp_path, "2x", 4)
    shutil.rmtree(next(tmp_path.glob("disk*/objects")))
    found = scrub.scrub_namespace(namespace)
    assert found.damaged_files
    began = time.monotonic()
    done = repair.repair_namespace(namespace, found, bytes_per_second=10e6)
    assert time.monotonic() - began >= 0.9 * done.nbytes / 10e6
    namespace.close()


def test_a_file_that_changes_after_the_scrub_keeps_its_new_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = filled_namespace(tmp_path, "2x", 4)
    file = large_file(namespace)
    assert file.layout is not None
    holder = file.layout.objects[0]
    (tmp_path / holder.member / "objects" / holder.name).unlink()
    found = scrub.scrub_namespace(namespace)
    namespace.put("d/f4", random_bytes(100_000, 9))
    repair.repair_namespace(namespace, found)
    assert namespace.get("d/f4") == random_bytes(100_000, 9)
    monkeypatch.setattr(scrub, "GRACE_SECONDS", -10.0)
    require_whole(namespace, verify=True)  # and no other object is left
    namespace.close()


@pytest.mark.parametrize("count", [1, 3])
def test_a_listing_never_leaves_out_a_file_whose_records_are_damaged(tmp_path: Path, count: int) -> None:
    """A caller that deletes what it does not find in a listing would lose the file."""
    namespace = filled_namespace(tmp_path, "2x" if count > 1 else "1x", count)
    for i, member in enumerate(sorted(namespace.open_members)):
        if i < count // 2:
            damage_record(tmp_path / member, "d/f1")
    assert sorted(namespace.list()) == [*sorted(content())], "a quorum of the records is whole"
    for i, member in enumerate(sorted(namespace.open_members)):
        if i >= count // 2:
            damage_record(tmp_path / member, "d/f1")
    with pytest.raises(Unavailable, match="d/f1"):
        namespace.list()
    with pytest.raises(Unavailable, match="d/f1"):
        namespace.list("d")
    namespace.close()


def test_one_record_without_a_quorum_stops_no_scrub_and_no_repair(tmp_path: Path) -> None:
    """The other files are checked and repaired, and no object is deleted meanwhile."""
    namespace = filled_namespace(tmp_path, "2x", 3)
    file = large_file(namespace)
    assert file.layout is not None
    lost = file.layout.objects[0]
    (tmp_path / lost.member / "objects" / lost.name).unlink()
    for member in namespace.open_members:
        damage_record(tmp_path / member, "d/f1")
    found = scrub.scrub_namespace(namespace)
    assert list(found.unreadable_paths) == ["d/f1"]
    assert [health.path for health in found.damaged_files] == ["d/f4"]
    assert not found.orphans
    repair.repair_namespace(namespace, found)
    assert [health.path for health in scrub.scrub_namespace(namespace).damaged_files] == []
    namespace.close()


def test_a_truncated_object_is_found_without_reading_it(tmp_path: Path) -> None:
    """A file system may lose the end of a file in a crash. The members list the length of each object."""
    namespace = filled_namespace(tmp_path, "2x", 4)
    file = large_file(namespace)
    assert file.layout is not None
    holder = file.layout.objects[0]
    with open(tmp_path / holder.member / "objects" / holder.name, "r+b") as opened:
        opened.truncate(1000)
    found = scrub.scrub_namespace(namespace)
    assert [(f.path, f.state, f.damaged_objects) for f in found.damaged_files] == [
        ("d/f4", "endangered", ((holder.member, holder.name),))
    ]
    assert not repair.repair_namespace(namespace, found).failed
    assert_whole(namespace, "2x")
    namespace.close()


def test_a_member_that_answers_no_call_is_asked_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call to a node that hangs would wait for minutes."""
    namespace = Namespace(directories(tmp_path, 2))
    for i in range(20):
        namespace.put(f"f{i}", random_bytes(50_000, i))
    member = sorted(namespace.open_members)[0]
    calls: list[str] = []

    def hang(name: str, ranges: object) -> None:
        calls.append(name)
        raise Unavailable(f"{member} does not answer")

    monkeypatch.setattr(namespace.open_members[member], "verify", hang)
    found = scrub.scrub_namespace(namespace, verify=True)
    assert len(calls) == 3
    assert found.unchecked_bytes == 20 * 50_000, "all bytes of this member"
    assert not found.is_whole
    namespace.close()
