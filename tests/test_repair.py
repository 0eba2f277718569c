"""Scrub and repair: what was lost, rotten or forgotten is found, and made whole."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from cluster import Here, Process, directories, nodes_config, quick

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace, open_namespace
from ckpt.aggregator.maintenance import rebalance
from ckpt.aggregator.maintenance import repair as repairs
from ckpt.aggregator.maintenance import scrub as surveys
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.aggregator.records.file_record import FileLayout, PathRecord
from ckpt.aggregator.records.ring_change import change_ring
from ckpt.storage.base.errors import InvalidArgument, NoSpace, StoreError
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.registers.base import DamagedRecord, Record
from ckpt.storage.testing import random_bytes


def content() -> dict[str, bytes]:
    return {f"d/f{i}": random_bytes(n, i) for i, n in enumerate([0, 100, 40_000, 300_000, 9_000_000])}


def filled(folder: Path, redundancy: str, count: int = 6) -> Namespace:
    namespace = Namespace(directories(folder, count, redundancy=redundancy))
    for path, data in content().items():
        namespace.put(path, data)
    namespace.settle([f"/{path}" for path in content()])  # put waits for a majority of the records
    return namespace


def large(namespace: Namespace, path: str = "d/f4") -> PathRecord:
    file = namespace.stat(path)
    assert file is not None
    assert file.layout is not None
    return file


def whole(namespace: Namespace, redundancy: str) -> None:
    """Everything is there, as redundant as it should be, and nothing else."""
    found = surveys.scrub_namespace(namespace, verify=True)
    assert found.is_whole, found
    assert found.files == len(content())
    for path, data in content().items():
        assert namespace.get(path) == data
        file = namespace.stat(path)
        assert file is not None
        if file.layout is not None:
            for piece in file.layout.stripes:
                members = [file.layout.objects[f.object_index].member for f in piece.fragments if f is not None]
                assert len(set(members)) == len(members) == parse_redundancy(redundancy).total_fragments


@pytest.mark.parametrize(("redundancy", "lost"), [("2x", 1), ("3x", 2), ("4+2", 1)])
def test_lost_disks(tmp_path: Path, redundancy: str, lost: int) -> None:
    """New empty folders in the place of lost ones, one after the other."""
    namespace = filled(tmp_path, redundancy)
    assert surveys.scrub_namespace(namespace, verify=True).is_whole
    namespace.close()
    for i in range(3):
        for j in range(lost):
            shutil.rmtree(tmp_path / f"disk{(i + j) % 6}" / "objects", ignore_errors=True)
        namespace = Namespace(directories(tmp_path, 6, redundancy=redundancy))
        found = surveys.scrub_namespace(namespace)
        assert [f.spare_fragments for f in found.damaged_files] == sorted(f.spare_fragments for f in found.damaged_files), (
            "the most endangered first"
        )
        done = repairs.repair_namespace(namespace, found)
        assert not done.failed
        whole(namespace, redundancy)
        namespace.close()


def test_too_few_members_get_what_they_can(tmp_path: Path) -> None:
    """4+2 on six: one is away, and another comes back empty. What that one had is made anew on it; the other keeps its part."""
    namespace = filled(tmp_path, "4+2", 6)
    namespace.close()
    shutil.rmtree(tmp_path / "disk1" / "objects")
    (tmp_path / "disk0").rename(tmp_path / "away")
    (tmp_path / "disk0").write_text("no directory")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    found = surveys.scrub_namespace(namespace)
    assert found.damaged_files
    assert {f.spare_fragments for f in found.damaged_files} == {0}
    done = repairs.repair_namespace(namespace, found)
    assert set(done.failed) == {f.path for f in found.damaged_files}
    assert all("only 5 of 6 fragments are there" in why for why in done.failed.values()), done.failed
    assert {f.spare_fragments for f in surveys.scrub_namespace(namespace, verify=True).damaged_files} == {1}
    namespace.close()
    (tmp_path / "disk0").unlink()
    (tmp_path / "away").rename(tmp_path / "disk0")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    namespace.settle([f"/{path}" for path in content()])
    whole(namespace, "4+2")  # without another repair, and with each fragment on a member of its own
    namespace.close()


def rot(layout: FileLayout, index: int, member: str, folder: Path) -> None:
    """Damage the fragment of a piece that a member has."""
    fragments = [f for f in layout.stripes[index].fragments if f is not None]
    fragment = next(f for f in fragments if layout.objects[f.object_index].member == member)
    with open(folder / "objects" / layout.objects[fragment.object_index].name, "r+b") as file:
        file.seek(fragment.position)
        first = file.read(1)
        file.seek(fragment.position)
        file.write(bytes([first[0] ^ 1]))


def test_who_was_damaged_once_is_asked_again(tmp_path: Path) -> None:
    """Of two members each has rot in another piece, and a third is lost: of every piece there is enough."""
    nodes = [Here(tmp_path / f"n{i}") for i in range(6)]
    namespace = quick(nodes_config(nodes, redundancy="4+2"))
    data = random_bytes(30_000_000, 1)
    namespace.put("a", data)
    layout = large(namespace, "a").layout
    namespace.close()
    assert layout is not None
    for index, node in enumerate(nodes[1:3]):
        rot(layout, index, node.address, node.folder)
    nodes[0].close()
    namespace = quick(nodes_config(nodes, redundancy="4+2"))
    for _ in range(3):
        assert namespace.get("a") == data
    for each in (namespace, *nodes[1:]):
        each.close()


def test_rot_while_a_member_is_away(tmp_path: Path) -> None:
    """4+2 on six: one is away, and two others each have rot in another piece. All is read, and a repair does what it can:
    when the one is back two more may be lost."""
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    data = random_bytes(30_000_000, 1)
    namespace.put("a", data)
    namespace.settle(["/a"])
    layout = large(namespace, "a").layout
    namespace.close()
    assert layout is not None
    for index, member in enumerate(["disk1", "disk2"]):
        rot(layout, index, member, tmp_path / member)
    (tmp_path / "disk0").rename(tmp_path / "away")
    (tmp_path / "disk0").write_text("no directory")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    assert namespace.get("a") == data
    found = surveys.scrub_namespace(namespace, verify=True)
    assert [f.spare_fragments for f in found.damaged_files] == [0]
    assert set(repairs.repair_namespace(namespace, found).failed) == {"a"}
    namespace.close()
    (tmp_path / "disk0").unlink()
    (tmp_path / "away").rename(tmp_path / "disk0")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    assert not surveys.scrub_namespace(namespace, verify=True).damaged_files
    namespace.close()
    for lost in ("disk1", "disk2"):
        shutil.rmtree(tmp_path / lost / "objects")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    assert namespace.get("a") == data
    namespace.close()


def test_a_member_that_takes_nothing_costs_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repair asks the full one once, and reads nothing for it."""
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    namespace.put("first", b"1")

    def full(*_: object) -> None:
        raise NoSpace("full")

    monkeypatch.setattr(namespace.open_members["disk0"].store, "create", full)
    namespace.put("a", random_bytes(20_000_000, 1))
    found = surveys.scrub_namespace(namespace)
    monkeypatch.setattr("ckpt.aggregator.file_io.rebuild._SourceObjects.read", lambda *_: pytest.fail("it was read"))
    done = repairs.repair_namespace(namespace, found)
    assert list(done.failed) == ["a"]
    assert done.nbytes == 0
    namespace.close()


def test_rot(tmp_path: Path) -> None:
    namespace = filled(tmp_path, "2x", 4)
    file = large(namespace)
    assert file.layout is not None
    holder = file.layout.objects[0]
    victim = tmp_path / holder.member / "objects" / holder.name
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
    assert surveys.scrub_namespace(namespace).is_whole, "lists do not show it"
    found = surveys.scrub_namespace(namespace, verify=True)
    assert [(f.path, f.state, f.damaged_objects) for f in found.damaged_files] == [
        ("d/f4", "endangered", ((holder.member, holder.name),))
    ]
    assert not repairs.repair_namespace(namespace, found).failed
    whole(namespace, "2x")
    assert not victim.exists()
    (aside,) = (tmp_path / holder.member / "quarantine").iterdir()
    assert aside.read_bytes() == raw, "kept for whoever wants to know why"
    namespace.close()


def test_what_is_lost_is_said(tmp_path: Path) -> None:
    namespace = filled(tmp_path, "2x", 4)
    file = large(namespace)
    assert file.layout is not None
    for holder in file.layout.objects:
        (tmp_path / holder.member / "objects" / holder.name).unlink()
    found = surveys.scrub_namespace(namespace)
    assert [(f.path, f.state) for f in found.lost_files] == [("d/f4", "lost")]
    done = repairs.repair_namespace(namespace, found)
    assert list(done.failed) == ["d/f4"]
    assert surveys.scrub_namespace(namespace).lost_files, "its record stays: the members may come back"
    namespace.close()


def test_what_can_not_be_checked_is_not_whole(tmp_path: Path) -> None:
    namespace = Namespace(directories(tmp_path, 4))
    for i in range(20):
        namespace.put(f"f{i}", random_bytes(50_000, i))

    def lose(nbytes: int) -> None:
        for folder in tmp_path.glob("disk*/objects/*"):
            shutil.rmtree(folder, ignore_errors=True)

    found = surveys.scrub_namespace(namespace, True, lose)
    assert found.unchecked_bytes > 0
    assert (found.missing_members, found.damaged_files) == ({}, []), "they were there when it began"
    assert not found.is_whole


def test_what_is_deleted_during_a_scrub_is_not_missed(tmp_path: Path) -> None:
    namespace = filled(tmp_path, "2x")

    def delete(nbytes: int) -> None:
        namespace.delete(list(content()))

    assert surveys.scrub_namespace(namespace, True, delete).unchecked_bytes == 0


def test_a_probe_of_who_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = filled(tmp_path, "2x")
    health, broken = namespace.fan_out.health, []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    monkeypatch.setattr(health, "_first_pause_seconds", 0.0)
    health.record_failure("disk2", "it is lost")
    namespace.drop_member("disk2")
    while health.is_down("disk2") and not broken:
        time.sleep(0.01)
    assert not broken


def test_forgotten_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a writer that died: kept while it may be at work, deleted later."""
    namespace = filled(tmp_path, "2x", 4)
    writer = namespace.create("torn")
    writer.append(memoryview(random_bytes(1 << 20)))
    writer._commit_objects()
    assert surveys.scrub_namespace(namespace).is_whole
    monkeypatch.setattr(surveys, "GRACE_SECONDS", -10.0)
    found = surveys.scrub_namespace(namespace)
    assert sum(map(len, found.orphans.values())) == 2
    assert repairs.repair_namespace(namespace, found).orphans == 2
    whole(namespace, "2x")
    namespace.close()


def test_no_object_is_deleted_while_a_record_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the one that names the object. Once it is whole again, the object goes."""
    namespace = filled(tmp_path, "2x", 4)
    writer = namespace.create("torn")
    writer.append(memoryview(random_bytes(1 << 20)))
    writer._commit_objects()
    monkeypatch.setattr(surveys, "GRACE_SECONDS", -10.0)
    member = namespace.ring.replica_set("/d/f4").members[0]
    with sqlite3.connect(tmp_path / member / "registers.sqlite") as db:
        db.execute("UPDATE registers SET body = 'rot' WHERE name = '/d/f4'")
    db.close()
    found = surveys.scrub_namespace(namespace)
    assert found.lagging_paths == ["d/f4"]
    assert found.orphans == {}
    assert repairs.repair_namespace(namespace, found).orphans == 2
    whole(namespace, "2x")
    namespace.close()


def test_deleted_files_do_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that was away still has the record and the objects: the tombstone wins, and the objects go."""
    namespace = filled(tmp_path, "2x", 4)
    namespace.close()
    (tmp_path / "disk1").rename(tmp_path / "away")
    (tmp_path / "disk1").write_text("not there")
    left = Namespace(directories(tmp_path, 4))
    left.delete(["d/f3", "d/f4"])
    assert not any(p in left.list() for p in ("d/f3", "d/f4"))
    left.close()
    (tmp_path / "disk1").unlink()
    (tmp_path / "away").rename(tmp_path / "disk1")
    monkeypatch.setattr(surveys, "GRACE_SECONDS", -10.0)
    back = Namespace(directories(tmp_path, 4))
    for _ in range(2):
        found = surveys.scrub_namespace(back)
        assert not any(p in back.list() for p in ("d/f3", "d/f4"))
        repairs.repair_namespace(back, found)
    assert surveys.scrub_namespace(back).is_whole
    assert back.stat("d/f3") is None
    held = sum(len([p for p in (tmp_path / f"disk{i}" / "objects").rglob("*") if p.is_file()]) for i in range(4))
    file = back.stat("d/f2")
    assert file is not None
    assert file.layout is not None
    assert held == len(file.layout.objects), "nothing is left of them"
    back.close()


def test_records_that_were_lost(tmp_path: Path) -> None:
    """A whole file of registers is damaged: nothing is forgotten meanwhile, and the records come back from the others."""
    namespace = filled(tmp_path, "2x", 4)
    namespace.close()
    file = tmp_path / "disk2" / "registers.sqlite"
    file.write_bytes(b"\xff" * file.stat().st_size)
    namespace = Namespace(directories(tmp_path, 4))
    for path, data in content().items():
        assert namespace.get(path) == data
    namespace.open_members["disk2"].registers.reset()
    assert isinstance(namespace.open_members["disk2"].registers.read(["/none"])[0], DamagedRecord), (
        "it may not say that there is nothing"
    )
    found = surveys.scrub_namespace(namespace)
    assert found.lagging_paths
    repairs.repair_namespace(namespace, found)
    assert not surveys.scrub_namespace(namespace).lagging_paths
    assert namespace.open_members["disk2"].registers.read(["/none"]) == [Record()]
    whole(namespace, "2x")
    namespace.close()


@pytest.mark.parametrize("point", ["repair.piece", "repair.commit", "ledger.change", "ledger.changed"])
def test_killed_in_a_repair(tmp_path: Path, point: str) -> None:
    filled(tmp_path, "2x", 4).close()
    shutil.rmtree(next(tmp_path.glob("disk*/objects")))  # not every disk holds something
    program = (
        "import sys; from pathlib import Path; from cluster import directories\n"
        "from ckpt.aggregator.file_io.namespace import Namespace\n"
        "from ckpt.aggregator.maintenance.repair import repair_namespace, scrub_namespace\n"
        "n = Namespace(directories(Path(sys.argv[1]), 4)); repair_namespace(n, scrub_namespace(n)); print('done'); n.close()"
    )
    environment = os.environ | {"CKPT_FAILPOINTS": f"{point}=kill", "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    namespace = Namespace(directories(tmp_path, 4))
    for path, data in content().items():
        assert namespace.get(path) == data
    assert not repairs.repair_namespace(namespace, surveys.scrub_namespace(namespace)).failed
    whole(namespace, "2x")
    namespace.close()


def test_at_a_bounded_rate(tmp_path: Path) -> None:
    namespace = filled(tmp_path, "2x", 4)
    shutil.rmtree(next(tmp_path.glob("disk*/objects")))
    found = surveys.scrub_namespace(namespace)
    assert found.damaged_files
    began = time.monotonic()
    done = repairs.repair_namespace(namespace, found, bytes_per_second=10e6)
    assert time.monotonic() - began >= 0.9 * done.nbytes / 10e6
    namespace.close()


def test_a_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = filled(tmp_path, "2x", 4)
    file = large(namespace)
    assert file.layout is not None
    holder = file.layout.objects[0]
    (tmp_path / holder.member / "objects" / holder.name).unlink()
    found = surveys.scrub_namespace(namespace)
    namespace.put("d/f4", random_bytes(100_000, 9))
    repairs.repair_namespace(namespace, found)
    assert namespace.get("d/f4") == random_bytes(100_000, 9)
    monkeypatch.setattr(surveys, "GRACE_SECONDS", -10.0)
    assert surveys.scrub_namespace(namespace, verify=True).is_whole, "and no object is left over"
    namespace.close()


@pytest.mark.parametrize("redundancy", ["1x", "2x", "4+2"])
def test_draining(tmp_path: Path, redundancy: str) -> None:
    """All goes elsewhere, of files that lie there alone too; then its disk may go."""
    namespace = filled(tmp_path, redundancy, 7)
    assert not rebalance.drain_member(namespace, "disk1").failed
    assert not namespace.open_members["disk1"].inventory()
    whole(namespace, redundancy)
    with pytest.raises(InvalidArgument, match="disk9 is no member"):
        rebalance.drain_member(namespace, "disk9")
    namespace.close()


def test_draining_what_is_read_only(tmp_path: Path) -> None:
    """It could delete nothing. Taken out for ever it can be, and nothing is lost."""
    nodes = [Here(tmp_path / f"n{i}") for i in range(4)]

    def opened() -> Namespace:
        members = [{"url": node.address, "name": f"n{i}"} for i, node in enumerate(nodes)]
        return Namespace(config_from_table("test", {"members": members, "redundancy": "2x"}, "the test"))

    with closing(opened()) as namespace:
        for path, data in content().items():
            namespace.put(path, data)
    nodes[0].close()
    nodes[0] = Here(tmp_path / "n0", NodeOptions(read_only=True))
    with closing(opened()) as namespace:
        with pytest.raises(InvalidArgument, match="n0 is read-only, so that it can't delete"):
            rebalance.drain_member(namespace, "n0")
        assert not rebalance.remove_member(namespace, "n0").failed
        assert surveys.scrub_namespace(namespace, verify=True).is_whole
    for node in nodes:
        node.close()


def test_rebalancing(tmp_path: Path) -> None:
    """Two more members: they get their part, and no more than that is moved."""
    namespace = Namespace(directories(tmp_path, 4))
    for i in range(40):
        namespace.put(f"f{i}", random_bytes(40_000, i))
    namespace.close()
    grown = Namespace(directories(tmp_path, 6))
    done = rebalance.rebalance_fragments(grown)
    assert not done.failed
    held = {name: len(place.inventory()) for name, place in grown.open_members.items()}
    assert sum(held.values()) == 80
    assert min(held["disk4"], held["disk5"]) > 4
    assert done.nbytes <= 40_000 * (held["disk4"] + held["disk5"]), "only what the new ones take"
    for i in range(40):
        assert grown.get(f"f{i}") == random_bytes(40_000, i)
    assert not rebalance.rebalance_fragments(grown).files
    assert surveys.scrub_namespace(grown, verify=True).is_whole
    grown.close()


SEEDS = [int(os.environ["CKPT_SEED"])] if "CKPT_SEED" in os.environ else range(1000 if os.environ.get("CKPT_SOAK") else 15)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_fault_schedules(tmp_path: Path, seed: int) -> None:
    """Random writes, deletions, losses, rot, repairs and changes of the members that keep records: every acknowledged file is
    readable and equal, after each step."""
    draw = random.Random(seed)
    redundancy, count = draw.choice([("2x", 4), ("3x", 5), ("2+1", 5), ("4+2", 7)])
    code = parse_redundancy(redundancy)
    known: dict[str, bytes] = {"first": b"1"}
    numbers = itertools.count()
    hurt: set[str] = set()
    namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
    namespace.put("first", b"1")
    actions = ["put", "put", "put", "replace", "delete", "lose", "rot", "wipe", "away", "change", "repair", "open"]
    for _ in range(draw.randint(10, 25)):
        action = draw.choice(actions)
        if action in ("put", "replace"):
            path = draw.choice(list(known)) if action == "replace" and known else f"f{next(numbers)}"
            data = draw.randbytes(draw.choice([0, 10, 33_000, 70_000, 600_000]))
            namespace.put(path, data)
            known[path] = data
        elif action == "delete" and known:
            path = draw.choice(list(known))
            namespace.delete([path])
            del known[path]
        elif action == "change":
            ring = draw.sample(namespace.locations, draw.randint(2 * code.tolerated_losses + 1, count))
            if hurt & ({s.name for s in ring} | set(namespace.ring.all_members)):
                continue  # the records of those may be lost, too
            change_ring(namespace, ring)
        elif action == "away":  # and what is changed meanwhile, it does not know when it is back
            member = f"disk{draw.randrange(count)}"
            if hurt - {member} or not (tmp_path / member).exists():
                continue
            (tmp_path / member).rename(tmp_path / "away")
            (tmp_path / member).write_text("not here")
            data = draw.randbytes(draw.choice([10, 70_000]))
            path = draw.choice([*known, f"f{next(numbers)}"])
            namespace.put(path, data)
            known[path] = data
            (tmp_path / member).unlink()
            (tmp_path / "away").rename(tmp_path / member)
            namespace.close()
            namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
        elif action == "wipe":  # an empty disk in its place
            member = f"disk{draw.randrange(count)}"
            if len(hurt | {member}) > code.tolerated_losses:
                continue
            hurt.add(member)
            namespace.close()
            shutil.rmtree(tmp_path / member, ignore_errors=True)
            namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
        elif action in ("lose", "rot"):
            member = f"disk{draw.randrange(count)}"
            if len(hurt | {member}) > code.tolerated_losses:
                continue
            hurt.add(member)
            objects = [p for p in (tmp_path / member / "objects").rglob("*") if p.is_file()]
            for victim in draw.sample(objects, draw.randint(0, len(objects))):
                if action == "lose":
                    victim.unlink()
                elif victim.stat().st_size:
                    raw = bytearray(victim.read_bytes())
                    raw[draw.randrange(len(raw))] ^= 0x40
                    victim.write_bytes(raw)
        elif action == "repair":
            done = repairs.repair_namespace(namespace, surveys.scrub_namespace(namespace, verify=True))
            assert not done.failed, (seed, done.failed)
            hurt.clear()
        elif action == "open":
            namespace.close()
            namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
        assert list(namespace.list()) == sorted(known), seed
        for path, data in known.items():
            try:
                assert namespace.get(path) == data, (seed, path)
            except StoreError as error:
                raise AssertionError(f"seed {seed}: {path}: {error}") from error
    namespace.close()


def admin(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt.tools.node", "admin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_commands(tmp_path: Path) -> None:
    """What an operator sees: all well, a lost disk, the repair, all well again; a member that is down."""
    nodes = [Process(tmp_path / f"n{i}") for i in range(4)]
    try:
        url = f"ckpt://{','.join(node.address for node in nodes)}"
        namespace, _ = open_namespace(url)
        for i in range(4):
            namespace.put(f"f{i}", random_bytes(3_000_000, i))
        done = admin("status", url)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("serving") == 4
        assert "4 of 4 members answer; new files are written as 2x" in done.stdout
        done = admin("scrub", url)
        assert (done.returncode, "4 files, 12.0 MB" in done.stdout, "all whole" in done.stdout) == (0, True, True), done
        disk = next(tmp_path.glob("n*/objects"))  # of a node that holds something
        disk.rename(tmp_path / "lost")  # at once: the node may be removing something there
        disk.mkdir()
        done = admin("scrub", "--quick", url)
        assert done.returncode == 1
        assert "endangered, 0 more of its fragments may be lost" in done.stdout
        done = admin("scrub", "--json", url)
        assert not json.loads(done.stdout)["whole"]
        done = admin("repair", url)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "made whole" in done.stdout
        assert "all whole now" in done.stdout
        assert admin("scrub", url).returncode == 0
        done = admin("drain", url, namespace.locations[3].name)
        assert (done.returncode, "new files still go to" in done.stdout) == (0, True), done
        nodes[3].kill()
        done = admin("status", url)
        assert done.returncode == 1
        assert "3 of 4 members answer" in done.stdout
        for i in range(4):
            assert namespace.get(f"f{i}") == random_bytes(3_000_000, i)
        done = admin("status", "ckpt://nowhere/")
        assert done.returncode == 1
        assert len(done.stderr.strip().splitlines()) == 1
    finally:
        for node in nodes:
            node.close()


def test_one_node_looks_after_the_namespace(tmp_path: Path) -> None:
    """A lost disk is made whole by itself; when the node that does it dies, another goes on."""
    nodes = [Process(tmp_path / f"n{i}") for i in range(4)]
    url = f"ckpt://{','.join(node.address for node in nodes)}"
    namespace, _ = open_namespace(url)
    for i in range(24):  # so that each node holds some
        namespace.put(f"f{i}", random_bytes(100_000, i))
    carers = [
        Process(tmp_path / f"c{i}", "--repair", url, "--repair-every", "0.3", failpoints="") for i in range(2)
    ]  # beside the namespace: they only look after it
    try:
        for victim in (0, 1):
            for path in (tmp_path / f"n{victim}" / "objects").rglob("*"):
                if path.is_file():
                    path.unlink()
            until = time.monotonic() + 60
            while not surveys.scrub_namespace(namespace).is_whole and time.monotonic() < until:
                time.sleep(0.2)
            assert surveys.scrub_namespace(namespace, verify=True).is_whole
            at_work = [c for c in carers if any("made whole" in line for line in c.log)]
            assert len(at_work) == 1 + victim, "one at a time"
            if not victim:
                at_work[0].kill()
        for i in range(24):
            assert namespace.get(f"f{i}") == random_bytes(100_000, i)
    finally:
        for node in (*nodes, *carers):
            node.close()
