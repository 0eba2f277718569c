"""Files that clients change or read while their fragments move: no change is lost, and a healthy file stays readable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.damaged_namespaces import large_file
from helpers.nodes import directories

from ckpt.aggregator.file_io import layout_replacement
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import all_records, rebalance, repair, scrub
from ckpt.aggregator.records.file_record import MemberObject
from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.testing import random_bytes

CONTENT = random_bytes(300_000, 1)
ADDED = random_bytes(50_000, 2)


def open_namespace(folder: Path, redundancy: str) -> Namespace:
    """Return a new client of a namespace on seven disks."""
    return Namespace(directories(folder, 7, redundancy=redundancy))


def objects(namespace: Namespace) -> Sequence[MemberObject]:
    """Return the objects of the file."""
    layout = large_file(namespace, "a").layout
    assert layout is not None
    return layout.objects


def holders(namespace: Namespace) -> list[str]:
    """Return the members that store fragments of the file."""
    return [member_object.member for member_object in objects(namespace)]


def lose_object(namespace: Namespace) -> str:
    """Delete one object of the file from its member, and return its name."""
    lost = objects(namespace)[0]
    namespace.open_members[lost.member].store.delete([lost.name])
    return lost.name


def run_before_replacement(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None], times: int = 1) -> list[str]:
    """Run `change` before the first replacements of a layout, after their new fragments were written. Return the calls."""
    calls: list[str] = []

    def stop(name: str) -> None:
        if name == "repair.record" and len(calls) < times:
            calls.append(name)
            change()

    monkeypatch.setattr(layout_replacement, "failpoint", stop)
    return calls


def append(namespace: Namespace, data: bytes) -> None:
    """Append to the file as another client does."""
    with namespace.create("a", aligned=False, base=namespace.stat("a")) as writer:
        writer.append(memoryview(data))
        writer.commit()


def extend(namespace: Namespace, nbytes: int) -> None:
    """Make the file longer, with zeros at its end. Its stripes stay the same."""
    file = large_file(namespace, "a")
    with namespace.create("a", aligned=False, base=file) as writer:
        writer.truncate(file.head.nbytes + nbytes)
        writer.commit()


@pytest.mark.parametrize(
    ("work", "redundancy"), [("drain", "1x"), ("drain", "2x"), ("drain", "4+2"), ("repair", "2x"), ("repair", "4+2")]
)
def test_a_new_length_outlasts_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, redundancy: str) -> None:
    """A client makes a file longer while its fragments move: only the head of the record differs, which has the length."""
    with (
        closing(open_namespace(tmp_path, redundancy)) as namespace,
        closing(open_namespace(tmp_path, redundancy)) as other,
    ):
        namespace.put("a", CONTENT)
        namespace.settle(["/a"])
        holder = holders(namespace)[0]
        if work == "repair":
            lose_object(namespace)
        calls = run_before_replacement(monkeypatch, lambda: extend(other, 1000))
        if work == "drain":
            assert not rebalance.drain_member(namespace, holder).failed
        else:
            repair.repair_namespace(namespace, scrub.scrub_namespace(namespace))
        assert calls
        assert large_file(namespace, "a").head.nbytes == len(CONTENT) + 1000
        assert namespace.get("a") == CONTENT + bytes(1000)


@pytest.mark.parametrize("redundancy", ["1x", "2x", "4+2"])
def test_a_drain_moves_files_that_change_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redundancy: str) -> None:
    """Two appends in a row are published while the fragments move; then the disk may be removed."""
    with (
        closing(open_namespace(tmp_path, redundancy)) as namespace,
        closing(open_namespace(tmp_path, redundancy)) as other,
    ):
        namespace.put("a", CONTENT)
        holder = holders(namespace)[0]
        calls = run_before_replacement(monkeypatch, lambda: append(other, ADDED), times=2)
        done = rebalance.drain_member(namespace, holder)
        assert len(calls) == 2
        assert not done.failed
        assert done.files == 1
        assert holder not in holders(namespace)
        assert not namespace.open_members[holder].inventory()
        assert namespace.get("a") == CONTENT + ADDED + ADDED


def test_a_drain_reports_a_file_that_always_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fragments are still on the member, so the drain must not count it as moved."""
    with closing(open_namespace(tmp_path, "1x")) as namespace, closing(open_namespace(tmp_path, "1x")) as other:
        namespace.put("a", CONTENT)
        holder = holders(namespace)[0]
        run_before_replacement(monkeypatch, lambda: append(other, ADDED), times=100)
        done = rebalance.drain_member(namespace, holder)
        assert list(done.failed) == ["a"]
        assert "it was changed during each of" in done.failed["a"]
        assert not done.files
        assert holder in holders(namespace)


def test_a_repair_counts_no_file_that_was_changed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next repair rebuilds it."""
    with closing(open_namespace(tmp_path, "2x")) as namespace, closing(open_namespace(tmp_path, "2x")) as other:
        namespace.put("a", CONTENT)
        namespace.settle(["/a"])
        lose_object(namespace)
        run_before_replacement(monkeypatch, lambda: append(other, ADDED))
        assert not repair.repair_namespace(namespace, scrub.scrub_namespace(namespace)).files
        assert repair.repair_namespace(namespace, scrub.scrub_namespace(namespace)).files == 1
        assert namespace.get("a") == CONTENT + ADDED


def drain_all_holders(namespace: Namespace) -> None:
    """Move all fragments of the file to other members."""
    for member in holders(namespace):
        assert not rebalance.drain_member(namespace, member).failed


@pytest.mark.parametrize("redundancy", ["1x", "2x", "4+1"])
def test_an_open_file_is_read_after_its_fragments_moved(tmp_path: Path, redundancy: str) -> None:
    """A reader that was opened before the move finds the fragments at their new members, also at a second move."""
    with (
        closing(open_namespace(tmp_path, redundancy)) as namespace,
        closing(open_namespace(tmp_path, redundancy)) as other,
    ):
        namespace.put("a", CONTENT)
        with other.open("a") as reader:
            for _ in range(2):
                drain_all_holders(namespace)
                data = bytearray(len(CONTENT) + 10)
                assert reader.read_into(0, memoryview(data)) == len(CONTENT)
                assert data[:-10] == CONTENT


def test_an_open_file_is_not_read_after_it_was_replaced(tmp_path: Path) -> None:
    """A reader never mixes two contents."""
    with closing(open_namespace(tmp_path, "2x")) as namespace, closing(open_namespace(tmp_path, "2x")) as other:
        namespace.put("a", CONTENT)
        with other.open("a") as reader:
            namespace.put("a", random_bytes(300_000, 3))
            with pytest.raises(Unavailable, match="can't be read"):
                reader.read_into(0, memoryview(bytearray(100)))


@pytest.mark.parametrize("redundancy", ["1x", "2x", "4+1"])
def test_a_file_is_got_while_its_fragments_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redundancy: str) -> None:
    """The move happens after `get` has read the record, and before it reads the first fragment."""
    with (
        closing(open_namespace(tmp_path, redundancy)) as namespace,
        closing(open_namespace(tmp_path, redundancy)) as other,
    ):
        namespace.put("a", CONTENT)
        moves: list[str] = []

        def move(name: str) -> None:
            if not moves:
                moves.append(name)
                drain_all_holders(namespace)

        monkeypatch.setattr("ckpt.aggregator.file_io.reader.failpoint", move)
        assert other.get("a") == CONTENT
        assert moves


def test_a_file_of_a_lost_member_is_not_read_for_ever(tmp_path: Path) -> None:
    with closing(open_namespace(tmp_path, "1x")) as namespace:
        namespace.put("a", CONTENT)
        lose_object(namespace)
        with pytest.raises(Unavailable, match="can't be read"):
            namespace.get("a")


@pytest.mark.parametrize("redundancy", ["1x", "2x"])
def test_a_drain_moves_a_file_that_is_renamed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redundancy: str
) -> None:
    """The new name is not in the list of files that the drain has read at its start."""
    with (
        closing(open_namespace(tmp_path, redundancy)) as namespace,
        closing(open_namespace(tmp_path, redundancy)) as other,
    ):
        namespace.put("a", CONTENT)
        holder = holders(namespace)[0]
        monkeypatch.setattr(all_records, "BATCH_PATHS", 1)
        namespace.put("z", ADDED)
        number = 0
        while holder not in [o.member for o in large_file(namespace, "z").layout.objects]:  # type: ignore[union-attr]
            namespace.put("z", random_bytes(50_000, number := number + 1))
        content = namespace.get("z")
        calls = run_before_replacement(monkeypatch, lambda: other.rename("z", "b"))
        assert not rebalance.drain_member(namespace, holder).failed
        assert calls
        layout = large_file(namespace, "b").layout
        assert layout is not None
        assert holder not in [o.member for o in layout.objects]
        assert namespace.get("b") == content


def lose_answer(monkeypatch: pytest.MonkeyPatch, namespace: Namespace, path: str, change: Callable[[], object]) -> list[str]:
    """Let the answer to the next direct change of a path get lost, and run `change` before the client notices."""
    registers = namespace.open_members[namespace.ring.replica_set(f"/{path}").members[0]].registers
    make, calls = registers.change, list[str]()

    def change_without_an_answer(*arguments: Any, **options: Any) -> list[bool]:
        done = make(*arguments, **options)
        if not calls:
            calls.append(path)
            assert done == [True]
            change()
            raise StoreError("the answer was lost")
        return done

    monkeypatch.setattr(registers, "change", change_without_an_answer)
    return calls


@pytest.mark.parametrize(("work", "redundancy"), [("drain", "1x"), ("drain", "2x"), ("repair", "2x")])
def test_a_move_whose_answer_was_lost_keeps_the_fragments_of_a_renamed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, redundancy: str
) -> None:
    """The file has its new fragments, and then another name: the record of its old name does not show that."""
    with closing(open_namespace(tmp_path, redundancy)) as mover, closing(open_namespace(tmp_path, redundancy)) as other:
        mover.put("a", CONTENT)
        member = holders(mover)[0]
        lost = {lose_object(mover)} if work == "repair" else set()
        found = scrub.scrub_namespace(mover)
        calls = lose_answer(monkeypatch, mover, "a", lambda: other.rename("a", "b"))
        if work == "repair":
            repair.repair_namespace(mover, found)
        else:
            rebalance.drain_member(mover, member)
        assert calls == ["a"]
        assert other.get("b") == CONTENT
        layout = large_file(other, "b").layout
        assert layout is not None
        missing = {o.name for o in layout.objects if not other.open_members[o.member].store.exists(o.name)}
        assert missing <= lost  # the rename may have read the record from before the repair


@pytest.mark.parametrize("redundancy", ["2x", "4+2"])
def test_a_file_that_is_cut_while_its_fragments_move_stays_cut(tmp_path: Path, redundancy: str) -> None:
    """The bytes beyond the new end must not appear again where the file grows later."""
    with closing(open_namespace(tmp_path, redundancy)) as client, closing(open_namespace(tmp_path, redundancy)) as mover:
        client.put("a", CONTENT)
        append(client, ADDED)
        for length in (320_000, 100_000):  # within the second stripe, and within the first one
            with client.create("a", aligned=False, base=client.stat("a")) as writer:
                writer.append(memoryview(ADDED))
                writer.truncate(length)
                assert rebalance.drain_member(mover, holders(mover)[0]).files
                writer.commit()
            assert client.get("a") == (CONTENT + ADDED)[:length]
        extend(client, 250_000)
        assert client.get("a") == CONTENT[:100_000] + bytes(250_000)
