"""The members that have the replicas of the records change; acknowledged changes stay."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from pathlib import Path

import pytest
from helpers.nodes import directories
from helpers.processes import SOAK
from helpers.registers import Flaky
from helpers.replica_sets import CONTENT, assert_all_files_exist, locations_of, make_three_member_namespace, record_members
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance, repair, scrub
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.aggregator.records.ring_change import change_ring, complete_ring_change
from ckpt.storage.base.errors import InvalidArgument, Outdated, StoreError, Unavailable
from ckpt.storage.registers.base import Ballot, DirectChange, Register, RegisterValue, final_record
from ckpt.storage.registers.sqlite import SqliteRegisters
from ckpt.storage.testing import random_bytes


def test_a_register_refuses_calls_of_older_rings(tmp_path: Path) -> None:
    registers = SqliteRegisters(str(tmp_path / "r.sqlite"))
    registers.mark_complete()
    registers.fence(5)
    registers.fence(3)  # lower than the present one
    for call in (
        lambda e: registers.read(["x"], e),
        lambda e: registers.prepare(["x"], Ballot(1, "a"), e),
        lambda e: registers.accept([("x", RegisterValue(b""))], Ballot(1, "a"), fence_number=e),
        lambda e: registers.drop(["x"], e),
        lambda e: registers.change([DirectChange("x", Ballot(0, ""), RegisterValue(b""))], "w", e),
        lambda e: registers.scan("", fence_number=e),
    ):
        with pytest.raises(Outdated, match="ring 5, and the call has ring 4"):
            call(4)
        call(5)
        call(0)
    registers.change([DirectChange("y", Ballot(0, ""), RegisterValue(b""))], "w", 7)
    with pytest.raises(Outdated, match="ring 7, and the call has ring 6"):
        registers.drop(["y"], 6)  # a late call of a ring change that is complete


def test_joining_a_ring_drops_records_once(tmp_path: Path) -> None:
    registers = SqliteRegisters(str(tmp_path / "r.sqlite"))
    registers.mark_complete()
    registers.change([DirectChange("old", Ballot(0, ""), RegisterValue(b""))], "w")
    registers.learn("ring/1", RegisterValue(b"agreed"))
    registers.join_ring(4, "ring")
    assert registers.read(["old"], 4) == [Register()]
    assert registers.read(["ring/1"], 4) == [final_record(RegisterValue(b"agreed"))], "a final value is not forgotten"
    assert registers.prepare(["ring/1"], Ballot(9, "p")) == [final_record(RegisterValue(b"agreed"))]
    registers.change([DirectChange("new", Ballot(0, ""), RegisterValue(b""))], "w", 4)
    registers.join_ring(4, "ring")
    registers.join_ring(3, "ring")
    assert [name for name, _ in registers.scan("")] == ["new", "ring/1"], "joining again drops nothing"


@pytest.mark.slow
@pytest.mark.parametrize("to", [(0, 1, 3), (3, 4, 5), (0, 1, 2, 3, 4, 5), (0,), (1, 2)])
def test_records_move_to_any_other_replica_set(tmp_path: Path, to: tuple[int, ...]) -> None:
    make_three_member_namespace(tmp_path, 6)
    old, new = (Namespace(directories(tmp_path, 6, deadline_seconds=5.0)) for _ in range(2))
    assert record_members(old) == {"disk0", "disk1", "disk2"}
    assert change_ring(new, locations_of(new, *to)).epoch == 3  # type: ignore[arg-type]
    assert record_members(new) == {f"disk{i}" for i in to}
    old.put("d/later", b"by a client that did not know")
    assert record_members(old) == {f"disk{i}" for i in to}, "the client has the new ring"
    assert new.get("d/later") == b"by a client that did not know"
    assert new.delete(["d/later"]) == ["d/later"]
    assert_all_files_exist(new)
    assert_all_files_exist(old)
    for i in range(6):
        names = {name for name, _ in new.open_members[f"disk{i}"].registers.scan("/")}
        kept = {name for name in names if f"disk{i}" in new.ring.replica_set(name).members}
        assert names == kept, "no member keeps records of others"
        assert len(kept) == (len(CONTENT) + 1) * (i in to) or len(to) > 3
    assert change_ring(new, locations_of(new, *to)).epoch == 3, "nothing is left to do"  # type: ignore[arg-type]


@pytest.mark.parametrize("absent", [0, 2])
def test_a_returning_member_of_an_old_ring_answers_no_read(
    tmp_path: Path, absent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was never fenced, and has the old records. A client that reaches only old members gets an error."""
    make_three_member_namespace(tmp_path, 4)
    stale = Namespace(directories(tmp_path, 4, deadline_seconds=2.0))
    assert stale.ring.epoch == 1
    new = Namespace(directories(tmp_path, 4, deadline_seconds=2.0))
    inner = new.open_members[f"disk{absent}"].registers
    new._member_registers[f"disk{absent}"] = new.open_members[f"disk{absent}"].registers = Flaky(inner, random.Random(0), 1.0)
    change_ring(new, locations_of(new, *({0, 1, 2, 3} - {absent})))  # type: ignore[arg-type]
    new.put("many/1", b"changed")
    new.delete(["many/2"])
    for other in {0, 1, 2} - {absent}:  # a client that reaches the member that was absent, and one more
        alone = {n: r if n in (f"disk{absent}", f"disk{other}") else Flaky(r, random.Random(0), 1.0)
                 for n, r in stale._member_registers.items()}  # fmt: skip
        monkeypatch.setattr(stale, "_member_registers", alone)
        monkeypatch.setattr(stale._replicated_registers, "_registers", alone)
        stale.invalidate_ring()
        with pytest.raises(StoreError):
            assert stale.get("many/1") == b"changed"
            assert stale.stat("many/2") is None
            raise StoreError("right")
        monkeypatch.undo()
    fresh = Namespace(directories(tmp_path, 4, deadline_seconds=2.0))
    assert fresh.get("many/1") == b"changed"
    assert fresh.stat("many/2") is None
    assert record_members(fresh) == {"disk0", "disk1", "disk2", "disk3"} - {f"disk{absent}"}


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["0", "zzzz"])
@pytest.mark.parametrize("after", [(0, 2, 3), (1, 2, 3)])
def test_a_value_without_a_quorum_does_not_replace_a_later_one(tmp_path: Path, writer: str, after: tuple[int, ...]) -> None:
    """One member accepted it before it was absent; its writer died. Later agreed values stay when that member is back."""
    make_three_member_namespace(tmp_path, 4)
    paths = [f"half/{i}" for i in range(12)]
    half = Namespace(directories(tmp_path, 4)).open_members["disk0"].registers
    lost = Namespace(directories(tmp_path, 4))
    lost.put("half", b"lost")
    ((_, record),) = [r for r in lost.open_members["disk1"].registers.scan("/half") if r[0] == "/half"]
    (full,) = lost.open_members["disk1"].registers.read(["/half"])
    assert isinstance(record, Register)
    assert isinstance(full, Register)
    assert full.value is not None
    half.change([DirectChange(f"/{path}", Ballot(0, ""), full.value) for path in paths], writer)
    mover = Namespace(directories(tmp_path, 4, deadline_seconds=2.0))
    mover._member_registers["disk0"] = mover.open_members["disk0"].registers = Flaky(half, random.Random(0), 1.0)
    change_ring(mover, locations_of(mover, 1, 2, 3))  # type: ignore[arg-type]
    for path in paths:
        mover.put(path, b"agreed", new=True)
    for to in (after, (0, 1, 2)):
        back = Namespace(directories(tmp_path, 4, deadline_seconds=2.0))
        change_ring(back, locations_of(back, *to))  # type: ignore[arg-type]
        for _ in range(3):
            assert {back.get(path) for path in paths} == {b"agreed"}


def test_a_ring_change_without_a_quorum_changes_nothing(tmp_path: Path) -> None:
    """Members that can't be fenced could still agree on a value: nothing moves, and clients continue with the old ring."""
    make_three_member_namespace(tmp_path, 5)  # of three members, two are a quorum
    namespace = Namespace(directories(tmp_path, 5, deadline_seconds=1.0))
    whole = dict(namespace._member_registers)
    for gone in ("disk1", "disk2"):
        namespace._member_registers[gone] = namespace.open_members[gone].registers = Flaky(whole[gone], random.Random(0), 1.0)
    with pytest.raises(Unavailable, match="start"):
        change_ring(namespace, locations_of(namespace, 0, 3, 4))  # type: ignore[arg-type]
    for gone in ("disk1", "disk2"):
        namespace._member_registers[gone] = namespace.open_members[gone].registers = whole[gone]
    namespace.invalidate_ring()
    assert_all_files_exist(namespace)


def test_one_of_two_members_is_removed_as_destroyed(tmp_path: Path) -> None:
    two = Namespace(directories(tmp_path, 2))
    for path, data in CONTENT.items():
        two.put(path, data)
    two.delete(["many/0"])
    two.close()
    shutil.rmtree(tmp_path / "disk1")
    (tmp_path / "disk1").write_text("a disk that is broken")
    namespace = Namespace(directories(tmp_path, 3, deadline_seconds=1.0))
    with pytest.raises(StoreError, match="start"):
        rebalance.remove_member(namespace, "disk1")
    done = rebalance.remove_member(namespace, "disk1", is_destroyed=True)
    assert not done.failed
    assert record_members(namespace) == {"disk0", "disk2"}
    assert_all_files_exist(namespace)
    require_whole(namespace, verify=True)
    with pytest.raises(InvalidArgument, match="1 member can be reached, and 2x needs 2; start the others"):
        rebalance.remove_member(namespace, "disk0")


def test_of_two_ring_changes_at_once_one_wins(tmp_path: Path) -> None:
    make_three_member_namespace(tmp_path, 6)
    both = [Namespace(directories(tmp_path, 6, deadline_seconds=5.0)) for _ in range(2)]
    ends: list[object] = []

    def change(namespace: Namespace, *to: int) -> None:
        try:
            ends.append({s.name for s in change_ring(namespace, locations_of(namespace, *to)).members})  # type: ignore[arg-type]
        except StoreError as error:
            ends.append(error)

    threads = [threading.Thread(target=change, args=(both[i], *to)) for i, to in enumerate([(0, 1, 3), (2, 4, 5)])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 2
    complete_ring_change(both[0])
    assert record_members(both[0]) in [{"disk0", "disk1", "disk3"}, {"disk2", "disk4", "disk5"}], ends
    for namespace in both:
        assert_all_files_exist(namespace)


@pytest.mark.soak
@pytest.mark.parametrize("lost", [(0, 1), (2, 3), (4, 5)] if not SOAK else list(itertools.combinations(range(6), 2)))
def test_a_write_of_higher_redundancy_enlarges_the_replica_sets(tmp_path: Path, lost: tuple[int, int]) -> None:
    """A file that is to outlive two members needs larger replica sets, also for the records that exist already."""
    first = Namespace(directories(tmp_path, 6, redundancy="2x"))
    first.put("old", b"of one who asked for less")
    more = Namespace(directories(tmp_path, 6, redundancy="4+2", deadline_seconds=5.0))
    for i in range(8):
        more.put(f"f{i}", random_bytes(50_000, i) if i % 2 else b"%d" % i)
    assert not more.ring.previous
    assert len(more.ring.replica_set("/f0").members) == 5
    first.put("f9", random_bytes(50_000, 9), redundancy=parse_redundancy("3x"))
    for i in lost:
        shutil.rmtree(tmp_path / f"disk{i}")
        (tmp_path / f"disk{i}").write_text("a disk that is broken")
    rest = Namespace(directories(tmp_path, 6, redundancy="4+2", deadline_seconds=5.0))
    for i in range(8):
        assert rest.get(f"f{i}") == (random_bytes(50_000, i) if i % 2 else b"%d" % i)
    assert rest.get("f9") == random_bytes(50_000, 9)
    assert rest.get("old") == b"of one who asked for less"


@pytest.mark.slow
def test_many_clients_enlarge_the_replica_sets_at_once(tmp_path: Path) -> None:
    make_three_member_namespace(tmp_path, 6)
    rebalance.rebalance_fragments(Namespace(directories(tmp_path, 6)))
    clients = [Namespace(directories(tmp_path, 6, redundancy="4+2", deadline_seconds=5.0)) for _ in range(4)]
    ends: list[object] = []

    def put(number: int) -> None:
        try:
            clients[number].put(f"more/{number}", random_bytes(50_000, number))
            ends.append(clients[number].ring.can_tolerate(2, 6))
        except StoreError as error:
            ends.append(error)

    threads = [threading.Thread(target=put, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [True] * 4
    for i in range(4):
        assert clients[0].get(f"more/{i}") == random_bytes(50_000, i)
    clients[0].delete([f"more/{i}" for i in range(4)])
    assert_all_files_exist(clients[0])


def test_replica_sets_grow_while_a_member_is_absent(tmp_path: Path) -> None:
    """The others continue without it, and its old records are outvoted when it is back."""
    whole = Namespace(directories(tmp_path, 7))
    for i in range(12):
        whole.put(f"f{i}", b"old")
    whole.close()
    (tmp_path / "disk3").rename(tmp_path / "away")
    (tmp_path / "disk3").write_text("not mounted")
    rest = Namespace(directories(tmp_path, 7, redundancy="4+2", deadline_seconds=2.0))
    for i in range(12):
        rest.put(f"f{i}", b"new")
    assert rest.delete(["f0"])
    rest.close()
    (tmp_path / "disk3").unlink()
    (tmp_path / "away").rename(tmp_path / "disk3")
    for other in ("disk0", "disk6"):
        (tmp_path / other).rename(tmp_path / f"no-{other}")
        (tmp_path / other).write_text("not mounted")
    back = Namespace(directories(tmp_path, 7, redundancy="4+2", deadline_seconds=2.0))
    assert [back.get(f"f{i}") for i in range(1, 12)] == [b"new"] * 11
    assert back.stat("f0") is None


def test_too_few_members_for_the_redundancy_cause_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last of three members can't read the records, though it has the bytes: one warning recommends four members."""
    namespace = Namespace(directories(tmp_path, 3))
    namespace.put("a", b"1")
    for client in (namespace, Namespace(directories(tmp_path, 3, redundancy="3x"))):
        caplog.clear()
        for name in "bc":
            client.put(name, b"2", redundancy=parse_redundancy("3x"))
        assert [r.message for r in caplog.records if "has 3 members: after the loss of 2" in r.message] == [
            f"{client.url} has 3 members: after the loss of 2 the records can't be read, though 3x keeps the bytes; "
            "use 4 members or more"
        ]
        require_whole(client, verify=True)
    grown = Namespace(directories(tmp_path, 4, redundancy="3x"))
    caplog.clear()
    grown.put("b", b"2")
    assert not any("the records can't be read" in r.message for r in caplog.records)
    assert record_members(grown) == {"disk0", "disk1", "disk2", "disk3"}, "the new member keeps records, too"


def test_a_repair_enlarges_replica_sets_that_are_too_small(tmp_path: Path) -> None:
    """A namespace has such sets after the loss of a member, or if a writer was killed in a ring change."""
    namespace = Namespace(directories(tmp_path, 4, redundancy="3x"))
    namespace.put("a", random_bytes(100_000))
    change_ring(namespace, locations_of(namespace, 0, 1, 2))  # type: ignore[arg-type]
    found = scrub.scrub_namespace(namespace, verify=True)
    assert found.insufficient_redundancy == parse_redundancy("3x")
    assert not found.is_whole
    assert not repair.repair_namespace(namespace, found).failed
    require_whole(namespace, verify=True)
    assert record_members(namespace) == {"disk0", "disk1", "disk2", "disk3"}


def test_rebalancing_enlarges_replica_sets_for_the_redundancy(tmp_path: Path) -> None:
    make_three_member_namespace(tmp_path, 3)
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    rebalance.rebalance_fragments(namespace)
    assert len(namespace.ring.replica_set("/d/f0").members) == 5
    assert_all_files_exist(namespace)


def test_removing_an_unknown_member_is_refused(tmp_path: Path) -> None:
    make_three_member_namespace(tmp_path, 3)
    namespace = Namespace(directories(tmp_path, 3))
    with pytest.raises(InvalidArgument, match="nobody is not a member of ckpt://test; its members are disk0"):
        rebalance.remove_member(namespace, "nobody")
