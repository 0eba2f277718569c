"""Members that join, leave, are replaced or are confused with others: acknowledged files stay readable."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.nodes import LocalNode, directories, nodes_config
from helpers.registers import Flaky
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance, repair, scrub
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation
from ckpt.aggregator.records.file_record import FileRecord
from ckpt.aggregator.records.ring_change import change_ring, complete_ring_change
from ckpt.storage.base.errors import CkptError, InvalidArgument, NotFound, StoreError, Unavailable
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.registers.base import NO_BALLOT, Ballot, DirectChange, Register, Registers, RegisterValue
from ckpt.storage.remote.object_store import ObjectStore
from ckpt.storage.testing import random_bytes

DATA = random_bytes(70_000)


def of_disks(folder: Path, *numbers: int, **table: Any) -> Namespace:
    """Return a namespace of the directories with these numbers."""
    folder.mkdir(exist_ok=True)
    members = [{"url": str(folder / f"disk{i}"), "name": f"disk{i}"} for i in numbers]
    return Namespace(config_from_table("test", {"members": members, "deadline_seconds": 2.0, **table}, "the test"))


def silence(namespace: Namespace, *names: str) -> None:
    """Let these members of the namespace answer no call any more."""
    for name in names:
        inner = namespace.open_members[name].registers
        namespace._member_registers[name] = namespace.open_members[name].registers = Flaky(inner, random.Random(0), 1.0)


def test_reads_of_an_empty_namespace_create_nothing(tmp_path: Path) -> None:
    namespace = of_disks(tmp_path, 0)
    assert namespace.stat("a") is None
    assert namespace.list() == {}
    for reading in (
        lambda: scrub.scrub_namespace(namespace),
        lambda: rebalance.rebalance_fragments(namespace),
        lambda: rebalance.remove_member(namespace, "disk0"),
    ):
        with pytest.raises(NotFound, match="is empty: nothing was ever written to it"):
            reading()
    assert not namespace.exists()
    namespace.put("a", b"1")
    assert namespace.exists()


def test_a_thread_that_opens_a_member_of_a_new_ring_does_not_disturb_the_others(tmp_path: Path) -> None:
    """One thread asks all members. Another one finds a ring with more members between two of these calls."""
    namespace = of_disks(tmp_path, 0, 1, 2)
    namespace.put("a", b"x")
    ring = replace(namespace.ring, members=(*namespace.ring.members, MemberLocation("127.0.0.1:1")))

    class FindingRegisters:
        """Registers of a member. When they are first used, another thread opens the member that the new ring adds."""

        def __init__(self, inner: Registers) -> None:
            self._inner = inner

        @property
        def scan(self) -> Callable[[str], object]:
            thread = threading.Thread(target=namespace._open_ring_members, args=(ring,))
            thread.start()
            thread.join(600)
            return self._inner.scan

    first = next(iter(namespace.open_members))
    registers: Any = FindingRegisters(namespace.open_members[first].registers)
    namespace.open_members[first].registers = namespace._member_registers[first] = registers
    assert namespace.answers(600)
    assert "127.0.0.1:1" in namespace.open_members
    namespace.close()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_a_disk_of_another_namespace_is_refused(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Named among other members it does not take over, and no file of either namespace is deleted."""
    three = of_disks(tmp_path, 0, 1, 2)
    three.put("ours", DATA)
    alone = of_disks(tmp_path, 3)
    alone.put("theirs", DATA)
    for _ in range(10):
        both = of_disks(tmp_path, *order)
        with pytest.raises(InvalidArgument, match="belong to different namespaces|have records of another namespace"):
            assert both.get("ours") == DATA  # if the other namespace was not detected yet
            rebalance.rebalance_fragments(both)
    assert of_disks(tmp_path, 0, 1, 2).get("ours") == DATA
    assert of_disks(tmp_path, 3).get("theirs") == DATA


def test_two_namespaces_are_not_joined(tmp_path: Path) -> None:
    for numbers in ((0, 1, 2), (3, 4, 5)):
        of_disks(tmp_path, *numbers).put(f"of{numbers[0]}", DATA)
    for numbers in ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5), (3, 0)):
        with pytest.raises(CkptError, match="different namespaces|another namespace"):
            rebalance.rebalance_fragments(of_disks(tmp_path, *numbers))
    for numbers in ((0, 1, 2), (3, 4, 5)):
        assert list(of_disks(tmp_path, *numbers).list()) == [f"of{numbers[0]}"]


def test_two_first_users_with_different_members_create_one_ring(tmp_path: Path) -> None:
    """They start at the same time: afterwards there is one ring, or an error that names the members."""
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        both = [of_disks(folder, 0, 1), of_disks(folder, 0, 1, 2)]
        ends: list[object] = []

        def use(namespace: Namespace, ends: list[object] = ends) -> None:
            try:
                namespace.put("a", b"1")
                ends.append(namespace.ring.namespace)
            except StoreError as error:
                ends.append(error)

        threads = [threading.Thread(target=use, args=(each,)) for each in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({end for end in ends if isinstance(end, str)}) == 1, ends
        assert of_disks(folder, 0, 1, 2).get("a") == b"1"


def test_removing_a_member_that_is_needed_is_refused(tmp_path: Path) -> None:
    """One member is dead and the user names another one: it is refused, and the namespace stays usable."""
    namespace = of_disks(tmp_path, 0, 1, 2)
    namespace.put("a", DATA)
    shutil.rmtree(tmp_path / "disk1")
    (tmp_path / "disk1").write_text("broken")
    for name in ("disk0", "disk2"):
        with pytest.raises(InvalidArgument, match=f"without {name}, only 1 member can be reached, and 2x needs 2"):
            rebalance.remove_member(of_disks(tmp_path, 0, 1, 2), name)
    namespace.put("b", DATA)
    four = of_disks(tmp_path, 0, 1, 2, 3)
    assert not rebalance.remove_member(four, "disk1").failed
    assert of_disks(tmp_path, 0, 2, 3).get("b") == DATA


@pytest.mark.slow
def test_a_new_member_that_dies_while_records_move_is_replaced(tmp_path: Path) -> None:
    """Records move to it when it dies; another member takes its role."""
    namespace = of_disks(tmp_path, 0, 1)
    namespace.put("a", DATA)
    three = of_disks(tmp_path, 0, 1, 2)
    set_failpoints("ring.moving=error")
    try:
        with pytest.raises(OSError, match="injected"):
            rebalance.remove_member(three, "disk1")
    finally:
        set_failpoints("")
    shutil.rmtree(tmp_path / "disk2")
    (tmp_path / "disk2").write_text("broken")
    four = of_disks(tmp_path, 0, 1, 2, 3)
    assert four.ring.previous is not None
    assert four.get("a") == DATA
    assert not rebalance.remove_member(four, "disk2", is_destroyed=True).failed
    assert set(four.ring.all_members) == {"disk0", "disk3"}
    four.put("b", DATA)
    assert not rebalance.remove_member(of_disks(tmp_path, 0, 1, 3), "disk1").failed, "the removal was not completed before"
    rest = of_disks(tmp_path, 0, 3)
    assert rest.get("a") == rest.get("b") == DATA
    complete_ring_change(rest)


def test_an_empty_disk_does_not_make_a_file_absent(tmp_path: Path) -> None:
    """Of its replica set one member missed it, one has an empty disk, one is down: the file is not listed as absent."""
    namespace = of_disks(tmp_path, 0, 1, 2, 3, 4)
    namespace.put("x", b"1")
    path = next(f"f{i}" for i in range(100) if set(namespace.ring.replica_set(f"/f{i}").members) == {"disk0", "disk1", "disk2"})
    first = namespace.ring.replica_set(f"/{path}").members
    less = of_disks(tmp_path, 0, 1, 2, 3, 4)
    silence(less, first[2])
    less.put(path, b"precious")
    namespace.close()
    shutil.rmtree(tmp_path / first[0])
    again = of_disks(tmp_path, 0, 1, 2, 3, 4)
    silence(again, first[1])
    with pytest.raises(Unavailable):
        again.list()
    with pytest.raises(StoreError):
        change_ring(again, [s for s in again.locations if s.name in ("disk3", "disk4", first[2])])
    back = of_disks(tmp_path, 0, 1, 2, 3, 4)
    assert path in back.list()
    assert back.get(path) == b"precious"
    repair.repair_namespace(back, scrub.scrub_namespace(back))
    assert back.get(path) == b"precious"


def test_a_file_that_is_replaced_while_it_moves_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer deletes the objects that were to be moved: the new ones are moved, and no failure is reported."""
    namespace = of_disks(tmp_path, 0, 1, redundancy="1x")
    real, seeds, restored = rebalance.rebuild_fragments, count(), []

    def write() -> None:
        while not namespace.exists() or "disk1" not in holders(namespace, "a"):
            namespace.put("a", random_bytes(50_000, next(seeds)))

    def rebuild_late(*given: Any, **named: Any) -> Any:
        restored.append(given)
        if len(restored) == 1:
            namespace.delete(["a"])
            write()
        return real(*given, **named)

    write()
    monkeypatch.setattr(rebalance, "rebuild_fragments", rebuild_late)
    assert not rebalance.drain_member(namespace, "disk1").failed
    assert len(restored) == 2
    assert holders(namespace, "a") == {"disk0"}
    namespace.close()


def holders(namespace: Namespace, path: str) -> set[str]:
    file = namespace.stat(path)
    return set() if file is None or file.layout is None else {h.member for h in file.layout.objects}


def test_clients_with_an_old_url_follow_a_grown_namespace(tmp_path: Path) -> None:
    """The namespace grows from three to seven: open clients continue, and so do new clients with the old URL."""
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(7)]
    old = Namespace(nodes_config(nodes[:3]))
    old.put("a", DATA)
    rebalance.rebalance_fragments(Namespace(nodes_config(nodes)))
    assert old.get("a") == DATA
    old.put("b", DATA)
    late = Namespace(nodes_config(nodes[:3]))
    assert late.get("a") == late.get("b") == DATA
    assert len(late.ring.members) == 7
    for each in (old, late, *nodes):
        each.close()


def test_a_member_is_not_drained_where_too_few_others_exist(tmp_path: Path) -> None:
    namespace = of_disks(tmp_path, 0, 1)
    namespace.put("a", DATA)
    done = rebalance.drain_member(namespace, "disk0")
    assert "more members are needed" in done.failed["a"]
    assert namespace.get("a") == DATA


def striped_file(folder: Path, stripes: int) -> tuple[Namespace, FileRecord]:
    """Return a namespace on four disks and its file `f` of so many stripes; two stripes are on the same objects."""
    namespace = Namespace(directories(folder, 4, redundancy="2x"))
    while True:
        with namespace.create("f") as writer:
            for i in range(stripes):
                writer.append(memoryview(random_bytes(100_000, i)))
            file = writer.publish()
        assert file.layout is not None
        if len({frozenset(f.object_index for f in p.fragments if f) for p in file.layout.stripes}) == 1 or stripes > 2:
            return namespace, file


def damage_fragment(folder: Path, file: FileRecord, stripe: int, number: int) -> None:
    """Damage one fragment of one stripe of the file on its disk."""
    assert file.layout is not None
    fragment = file.layout.stripes[stripe].fragments[number]
    assert fragment is not None
    holder = file.layout.objects[fragment.object_index]
    with (folder / holder.member / "objects" / holder.name).open("r+b") as opened:
        opened.seek(fragment.position + 5000)
        opened.write(b"ROT!")


def test_objects_with_rot_in_different_stripes_are_repaired(tmp_path: Path) -> None:
    namespace, file = striped_file(tmp_path, 2)
    assert file.layout is not None
    whole = namespace.get("f")
    first, second = (p.fragments for p in file.layout.stripes)
    damage_fragment(tmp_path, file, 0, 0)
    assert first[0] is not None
    damage_fragment(
        tmp_path, file, 1, next(i for i, f in enumerate(second) if f is not None and f.object_index != first[0].object_index)
    )
    assert namespace.get("f") == whole
    done = repair.repair_namespace(namespace, scrub.scrub_namespace(namespace, verify=True))
    assert not done.failed
    require_whole(namespace, verify=True)
    assert namespace.get("f") == whole


@pytest.mark.parametrize("what", ["rename", "append"])
def test_a_file_that_changes_while_it_is_repaired_keeps_its_objects(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that the new record names are not deleted."""
    namespace, file = striped_file(tmp_path, 5)
    damage_fragment(tmp_path, file, 0, 0)
    other = Namespace(directories(tmp_path, 4, redundancy="2x"))
    real = repair.rebuild_fragments

    def rebuild_and_change(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        if what == "rename":
            other.rename("f", "g")
        else:
            with other.create("f", base=other.stat("f")) as writer:
                writer.append(memoryview(bytes(80_000)))
                writer.publish()
        return made

    monkeypatch.setattr(repair, "rebuild_fragments", rebuild_and_change)
    repair.repair_namespace(namespace, scrub.scrub_namespace(namespace, verify=True))
    monkeypatch.undo()
    found = scrub.scrub_namespace(namespace, verify=True)
    assert [len(f.lost.objects) for f in found.damaged_files] == [0], "one fragment is bad, and no object is missing"
    assert not repair.repair_namespace(namespace, found).failed
    require_whole(namespace, verify=True)


class DelayedStore:
    """A store as a slow process uses it: `then` runs before its first call of `name`."""

    def __init__(self, inner: ObjectStore, name: str, then: Callable[[], object]) -> None:
        self._inner, self._name, self._then = inner, name, [then]

    def __getattr__(self, name: str) -> Any:
        if name == self._name and self._then:
            self._then.pop()()
        return getattr(self._inner, name)


@pytest.mark.parametrize("late", ["get_tagged", "put_if"])
@pytest.mark.parametrize("what", ["drop", "join"])
def test_a_late_change_of_a_bucket_keeps_newer_values(monkeypatch: pytest.MonkeyPatch, what: str, late: str) -> None:
    """A late drop or join does not forget what a later ring has agreed on meanwhile."""
    obstore = pytest.importorskip("obstore.store")
    from ckpt.storage.member.bucket import BucketRegisters
    from ckpt.storage.remote import object_store

    memory = obstore.MemoryStore()
    monkeypatch.setattr(object_store, "_connect", lambda url: memory)
    store, pool = ObjectStore("s3://b/x"), ThreadPoolExecutor(2)
    registers: Registers = BucketRegisters(store, pool)
    registers.mark_complete()
    assert registers.change([DirectChange("/p", NO_BALLOT, RegisterValue(b"old"))], "w", 1) == [True]

    def meanwhile() -> None:
        registers.fence(4) if what == "drop" else registers.join_ring(4, "ring")
        assert registers.accept([("/p", RegisterValue(b"acknowledged"))], Ballot(2, "b"), fence_number=4) == [True]

    slow = BucketRegisters(DelayedStore(store, late, meanwhile), pool)  # type: ignore[arg-type]
    try:
        slow.drop(["/p"], 3) if what == "drop" else slow.join_ring(4, "ring/")
    except StoreError:
        pass  # the error that it is late
    (answer,) = registers.read(["/p"], 4)
    assert isinstance(answer, Register)
    assert answer.value == RegisterValue(b"acknowledged")
