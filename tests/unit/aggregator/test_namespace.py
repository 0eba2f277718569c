"""Files of a namespace: written, replaced, appended to, and read after the loss of members."""

from __future__ import annotations

import array
import random
import threading
from pathlib import Path

import pytest
from helpers.namespace_files import member_objects, objects
from helpers.nodes import LocalNode, directories, nodes_config
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.aggregator.records import file_record
from ckpt.storage.base.errors import (
    AlreadyExists,
    IntegrityError,
    StoreError,
    Unavailable,
)
from ckpt.storage.testing import random_bytes, run_simultaneously


def test_a_record_is_decoded_as_it_was_encoded(tmp_path: Path) -> None:
    head = file_record.RecordHead("file", 5, 1.5, 2.5, "v")
    stripe = file_record.Stripe(0, 5, (file_record.Fragment(0, 4096, b"s"), None), 5)
    for file in (
        file_record.FileRecord(head, inline_data=b"hello"),
        file_record.FileRecord(file_record.RecordHead("deleted", 0, 1.0, 2.0, "w")),
        file_record.FileRecord(
            head, layout=file_record.FileLayout(parse_redundancy("4+2"), (file_record.MemberObject("m", "n"),), (stripe,))
        ),
    ):
        assert file_record.decode_record("p", file_record.encode_record(file)) == file
    with pytest.raises(IntegrityError, match="the record of p can't be read"):
        file_record.decode_record("p", file_record.RegisterValue(b"\xc1", b""))


@pytest.mark.slow
@pytest.mark.parametrize("redundancy", ["1x", "2x", "3x", "2+1", "4+2"])
def test_a_file_of_many_stripes_is_read_at_any_offset(tmp_path: Path, redundancy: str) -> None:
    namespace = Namespace(directories(tmp_path, 6, redundancy=redundancy))
    data = random_bytes(20_000_003)
    with namespace.create("big", None, len(data), aligned=False) as writer:
        at = 0
        for length in (1, 5_000_000, 4096, 9_000_000, 5_995_906):
            writer.append(memoryview(data)[at : at + length])
            at += length
        writer.commit()
    assert namespace.get("big") == data
    with namespace.open("big") as reader:
        draw = random.Random(0)
        for _ in range(200):
            start, length = draw.randrange(len(data)), draw.choice([1, 100, 4096, 300_000, 7_000_000])
            buffer = bytearray(length)
            count = reader.read_into(start, memoryview(buffer))
            assert bytes(buffer[:count]) == data[start : start + length]
    stored = sum(p.stat().st_size for p in objects(tmp_path))
    assert stored <= parse_redundancy(redundancy).overhead * len(data) * 1.02 + 20 * 4096 * 6
    namespace.delete(["big"])
    assert not objects(tmp_path)
    assert namespace.stat("big") is None
    namespace.close()


@pytest.mark.slow
@pytest.mark.parametrize(("redundancy", "lost"), [("2x", 1), ("3x", 2), ("4+2", 2), ("2+1", 1)])
def test_files_are_read_after_any_tolerated_loss_of_members(tmp_path: Path, redundancy: str, lost: int) -> None:
    """Every combination of members is removed, as directories that are gone."""
    import itertools
    import shutil

    namespace = Namespace(directories(tmp_path / "all", 6, redundancy=redundancy))
    contents = {f"f{i}": random_bytes(n, i) for i, n in enumerate([0, 10, 32 << 10, 40_000, 3_000_000, 17_000_000])}
    for path, data in contents.items():
        namespace.put(path, data)
    namespace.close()
    for number, gone in enumerate(itertools.combinations(range(6), lost)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "all", folder)
        for i in gone:
            shutil.rmtree(folder / f"disk{i}")
            (folder / f"disk{i}").write_text("a file instead of the folder: nothing can be created in it")
        left = Namespace(directories(folder, 6, redundancy=redundancy))
        assert list(left.list()) == sorted(contents)
        for path, data in contents.items():
            assert left.get(path) == data, (path, gone)
        left.close()
        shutil.rmtree(folder)


def test_a_file_with_too_few_fragments_raises_an_error(tmp_path: Path) -> None:
    namespace = Namespace(directories(tmp_path, 4, redundancy="2x"))
    namespace.put("a", random_bytes(100_000))
    for member, name in member_objects(namespace, "a"):
        (tmp_path / member / "objects" / name).unlink()
    message = r"bytes 0 to 100000 of a in ckpt://test can't be read: 1 of 2 fragments are needed, 0 answer"
    with pytest.raises(StoreError, match=message):
        namespace.get("a")
    namespace.close()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_flipped_bytes_are_corrected_or_raise_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """In as many fragments as may be lost, the content is read all the same. In one more, an error is raised."""
    redundancy = data.draw(st.sampled_from(["1x", "2x", "2+1", "4+2"]))
    folder = tmp_path_factory.mktemp("flip")
    namespace = Namespace(directories(folder, 6, redundancy=redundancy))
    content = random_bytes(data.draw(st.integers(33_000, 900_000)))
    namespace.put("a", content)
    file = namespace.stat("a")
    assert file is not None
    assert file.layout is not None
    (stripe,) = file.layout.stripes
    tolerated = parse_redundancy(redundancy).tolerated_losses
    count = data.draw(st.integers(0, tolerated + 1))
    hit = data.draw(st.permutations(range(len(stripe.fragments))))[:count]
    for i in hit:
        fragment = stripe.fragments[i]
        assert fragment is not None
        holder = file.layout.objects[fragment.object_index]
        path = folder / holder.member / "objects" / holder.name
        raw = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        else:
            raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        path.write_bytes(raw)
    try:
        assert namespace.get("a") == content
    except (IntegrityError, StoreError) as error:
        assert count > tolerated, error
        assert "can't be read" in str(error)
    namespace.close()


def test_files_are_replaced_and_appended_to(tmp_path: Path) -> None:
    namespace = Namespace(directories(tmp_path, 3))
    for content in (b"short", random_bytes(100_000), b"", random_bytes(200_000, 1)):
        namespace.put("a", content)
        assert namespace.get("a") == content
    assert len(objects(tmp_path)) == 2, "no object of a replaced content is left"
    base = namespace.stat("a")
    with namespace.create("a", aligned=False, base=base) as writer:
        writer.append(memoryview(random_bytes(50_000, 2)))
        assert namespace.get("a") == random_bytes(200_000, 1), "the old content until the commit"
        writer.commit()
    assert namespace.get("a") == random_bytes(200_000, 1) + random_bytes(50_000, 2)
    with pytest.raises(AlreadyExists, match="a file of this name exists already"):
        namespace.put("a", b"new", new=True)
    namespace.make_folder("f")
    with pytest.raises(AlreadyExists, match="a folder of this name"):
        namespace.put("f", b"1")
    assert [(p, h.kind) for p, h in namespace.list().items()] == [("a", "file"), ("f", "folder")]
    namespace.close()


def test_the_length_of_a_range_is_counted_in_bytes(tmp_path: Path) -> None:
    namespace = Namespace(directories(tmp_path, 3))
    numbers = array.array("I", range(20_000))
    with namespace.create("a") as writer:
        writer.write_at(0, memoryview(numbers))
        assert writer.commit() == 80_000
    assert namespace.get("a") == numbers.tobytes()


def test_one_of_several_clients_creates_a_new_file(tmp_path: Path) -> None:
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(3)]
    clients = [Namespace(nodes_config(nodes)) for _ in range(3)]
    for attempt in range(8):
        size = [100, 100_000][attempt % 2]
        won: list[int] = []

        def put(i: int, attempt: int = attempt, size: int = size, won: list[int] = won) -> None:
            try:
                clients[i].put(f"race{attempt}", bytes([i]) * size, new=True)
                won.append(i)
            except AlreadyExists:
                pass

        threads = [threading.Thread(target=put, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert {c.get(f"race{attempt}") for c in clients} == {bytes(won) * size}
    for each in (*clients, *nodes):
        each.close()


def test_two_clients_that_replace_a_file_leave_one_content(tmp_path: Path) -> None:
    clients = [Namespace(directories(tmp_path, 3)) for _ in range(2)]
    contents = [[random_bytes(50_000, 10 * i + j) for j in range(6)] for i in range(2)]
    threads = [
        threading.Thread(target=lambda i=i: [clients[i].put("a", data) for data in contents[i]])
        for i in range(2)  # type: ignore[misc]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clients[0].get("a") == clients[1].get("a")
    assert clients[0].get("a") in [contents[0][-1], contents[1][-1]]
    assert len(objects(tmp_path)) == 2
    for client in clients:
        client.close()


@pytest.mark.parametrize("redundancy", ["1x", "2x", "2+1"])
def test_members_that_cannot_be_read_are_no_damage_whatever_their_folders_are_called(tmp_path: Path, redundancy: str) -> None:
    """The errors of these folders contain the words that describe damage. A damaged step is skipped; a missing disk is not."""
    folder = tmp_path / "cut and damaged"
    namespace = Namespace(directories(folder, 3, redundancy=redundancy))
    namespace.put("p", random_bytes(3_000_000))
    for path in objects(folder):
        path.unlink()
    with namespace.open("p") as reader, pytest.raises(Unavailable, match="can't be read"):
        reader.read_into(0, memoryview(bytearray(1000)))
    namespace.close()


def test_too_few_members_are_reported_while_other_members_fail(tmp_path: Path) -> None:
    """Several threads append: one finds that too few members are left, while others note further failed members."""
    namespace = Namespace(directories(tmp_path, 3))
    writer = namespace.create("a")
    over = threading.Event()

    def fail_members() -> None:
        try:
            for number in range(3_000):
                writer._choice.mark_failed(f"host{number}", StoreError("refused"))
        finally:
            over.set()

    def make_errors() -> set[type[StoreError]]:
        found = {type(writer._choice.too_few_error())}
        while not over.is_set():
            found.add(type(writer._choice.too_few_error()))
        return found

    failed, *kinds = run_simultaneously([fail_members, make_errors, make_errors])
    assert failed is None
    assert kinds == [{Unavailable}] * 2
    writer.abort()
    namespace.close()
