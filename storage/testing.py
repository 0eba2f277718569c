"""The contract of a store as a test suite. The file is long because a subclass must get all tests of one class.

The author of another store checks it with a few lines:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            return MyStore(...)        # a new, empty store for each test
"""

from __future__ import annotations

import array
import random
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from mmap import mmap
from typing import TypeVar

import pytest

from ckpt.storage.base.errors import AlreadyExists, Changed, IntegrityError, InvalidName, NotFound, StoreError
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.base.store import ALIGNMENT, Buffer, Store

T = TypeVar("T")

INVALID_NAMES = [
    "..",
    ".",
    "../a",
    "a/../b",
    "a/./b",
    "/abs",
    "a//b",
    "a/",
    "",
    ".hidden",
    "a/.hidden/b",
    "a b",
    "a\\b",
    "a\nb",
    "a\x00b",
    "a?b",
    "ä",
    "x" * 201,
    "/".join(["x" * 100] * 11),
]


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    """Return pseudo-random bytes, which differ for every seed."""
    return random.Random(seed).randbytes(nbytes)


def object_lengths(store: Store, prefix: str = "") -> dict[str, int]:
    """Return the length of each object below `prefix`, by name; fail if a name is listed twice."""
    entries = list(store.list(prefix))
    listed = {entry.name: entry.nbytes for entry in entries}
    assert len(listed) == len(entries), "a name is listed twice"
    return listed


def run_simultaneously(calls: Iterable[Callable[[], T]]) -> list[T | StoreError]:
    """Start all calls at the same moment, each in a thread; return their results, where a StoreError counts as a result."""
    every = list(calls)
    start = threading.Barrier(len(every))

    def run(call: Callable[[], T]) -> T | StoreError:
        start.wait()
        try:
            return call()
        except StoreError as error:
            return error

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads in the middle of a call, not only every 5 ms
    try:
        with ThreadPoolExecutor(len(every)) as pool:
            return list(pool.map(run, every))
    finally:
        sys.setswitchinterval(interval)


def write_object(store: Store, name: str, data: bytes) -> int:
    """Write `data` through a writer in one append, and return the length of the object."""
    with store.create(name) as writer:
        writer.append(memoryview(data))
        return writer.commit()


def read_range(store: Store, name: str, position: int, nbytes: int) -> bytes:
    """Return a range of an object, read through a reader; shorter at the end of the object."""
    with store.open(name) as reader:
        buffer = bytearray(nbytes)
        return bytes(buffer[: reader.read_into(position, memoryview(buffer))])


class StoreContract(ABC):
    """The tests that every store must pass. Override the fixture `store`."""

    @pytest.fixture
    @abstractmethod
    def store(self) -> Store | Iterator[Store]:
        """Return a new, empty store."""

    # --- put and get ---------------------------------------------------------------------------------------------

    def test_an_object_that_is_too_long_is_refused(self, store: Store) -> None:
        store.put("a/b", random_bytes(1000))
        assert store.get_up_to("a/b", 1000) == random_bytes(1000)
        with pytest.raises(IntegrityError, match="a/b has 1000 bytes, and at most 999"):
            store.get_up_to("a/b", 999)
        with pytest.raises(NotFound):
            store.get_up_to("a/c", 1000)

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 100_001])
    def test_put_then_get(self, store: Store, nbytes: int) -> None:
        data = random_bytes(nbytes)
        store.put("a/b/c.bin", data)
        assert store.get("a/b/c.bin") == data
        assert object_lengths(store) == {"a/b/c.bin": nbytes}

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_takes_any_buffer(self, store: Store, kind: Callable[[bytes], Buffer]) -> None:
        store.put("put", kind(b"some bytes"))
        store.put_new("new", kind(b"some bytes"))
        assert store.get("put") == store.get("new") == b"some bytes"
        assert isinstance(store.get("put"), bytes)

    def test_put_replaces(self, store: Store) -> None:
        store.put("a", random_bytes(10_000))
        store.put("a", b"short")
        assert store.get("a") == b"short"
        assert object_lengths(store) == {"a": 5}

    def test_readers_see_one_version_of_a_replaced_object(self, store: Store) -> None:
        versions = [bytes([i]) * 50_000 for i in range(4)]
        store.put("a", versions[0])
        seen = run_simultaneously(
            [lambda i=i: store.put("a", versions[i]) for i in range(4)]  # type: ignore[misc]
            + [lambda: store.get("a") for _ in range(4)]
        )
        assert all(data in versions for data in seen[4:])
        assert store.get("a") in versions

    def test_twenty_mebibytes(self, store: Store) -> None:
        data = random_bytes(20 * 1024 * 1024)
        store.put("put", data)
        assert write_object(store, "written", data) == len(data)
        assert object_lengths(store) == {"put": len(data), "written": len(data)}
        assert store.get("put") == data
        assert store.get("written") == data

    # --- put_new -------------------------------------------------------------------------------------------------

    def test_put_new(self, store: Store) -> None:
        store.put_new("a/b", b"first")
        assert store.get("a/b") == b"first"
        with pytest.raises(AlreadyExists, match="a/b"):
            store.put_new("a/b", b"second")
        assert store.get("a/b") == b"first"
        assert object_lengths(store) == {"a/b": 5}

    def test_put_new_after_put_and_delete(self, store: Store) -> None:
        store.put("a", b"1")
        with pytest.raises(AlreadyExists):
            store.put_new("a", b"2")
        store.delete(["a"])
        store.put_new("a", b"3")
        assert store.get("a") == b"3"

    def test_of_many_put_new_one_wins(self, store: Store) -> None:
        for attempt in range(10):
            name = f"race/{attempt}"
            results = run_simultaneously([lambda i=i: store.put_new(name, bytes([i]) * 1000) for i in range(4)])  # type: ignore[misc]  # noqa: B023
            winners = [i for i, result in enumerate(results) if result is None]
            assert len(winners) == 1, results
            assert all(isinstance(result, AlreadyExists) for result in results if result is not None)
            assert store.get(name) == bytes(winners) * 1000

    # --- publications --------------------------------------------------------------------------------------------

    def test_publish(self, store: Store) -> None:
        """A free name is taken once; an existing object is replaced only if its version is the one that was read."""
        confirmed: list[bool] = []

        def confirm() -> None:
            confirmed.append(store.exists("a/b"))

        store.publish("a/b", b"one", confirm)
        assert store.get("a/b") == b"one"
        with pytest.raises(AlreadyExists):
            store.publish("a/b", b"two", confirm)
        data, version = store.get_versioned("a/b", 1 << 20)
        assert data == b"one"
        store.publish("a/b", b"two", confirm, version)
        with pytest.raises((Changed, AlreadyExists)):
            store.publish("a/b", b"three", confirm, version)
        assert store.get("a/b") == b"two"
        assert confirmed[0] is False, "nothing is visible before it is confirmed"
        assert object_lengths(store, "a") == {"a/b": 3}

    def test_a_publication_that_is_not_confirmed(self, store: Store) -> None:
        def refuse() -> None:
            raise StoreError("the lease is another's")

        store.put("a/old", b"old")
        with pytest.raises(StoreError, match="the lease is another's"):
            store.publish("a/new", b"new", refuse)
        with pytest.raises(StoreError, match="the lease is another's"):
            store.publish("a/old", b"new", refuse, store.get_versioned("a/old", 1 << 20)[1])
        assert not store.exists("a/new")
        with pytest.raises(NotFound):
            store.get("a/new")
        assert store.get("a/old") == b"old"
        store.publish("a/new", b"later", lambda: None)
        assert store.get("a/new") == b"later"

    def test_a_publication_that_a_successor_revokes(self, store: Store) -> None:
        """The successor revokes it after it was confirmed. A store that can't fence does not promise this."""
        if not store.fences:
            pytest.skip("this store can't fence")

        def succeeded() -> None:
            store.sweep_temporaries("")
            assert store.revoke("a/b")

        with pytest.raises((Changed, AlreadyExists)):
            store.publish("a/b", b"old", succeeded)
        assert not store.exists("a/b")
        store.publish("a/b", b"new", lambda: None)
        version = store.get_versioned("a/b", 1 << 20)[1]

        def replaced() -> None:
            store.sweep_temporaries("")
            store.publish("a/b", b"newer", lambda: None, version)

        with pytest.raises((Changed, AlreadyExists)):
            store.publish("a/b", b"old", replaced, version)
        assert store.get("a/b") == b"newer"

    def test_of_many_publications_one_wins(self, store: Store) -> None:
        store.put("a", b"before")
        version = store.get_versioned("a", 1 << 20)[1]
        results = run_simultaneously([partial(store.publish, "b", b"%d" % n, lambda: None) for n in range(4)])
        assert sum(each is None for each in results) == 1, results
        assert store.get("b") == b"%d" % results.index(None)
        if store.fences and not isinstance(version, bytes):  # if the version is the content, callers must use a lock
            results = run_simultaneously([partial(store.publish, "a", b"%d" % n, lambda: None, version) for n in range(4)])
            assert sum(each is None for each in results) == 1, results
            assert store.get("a") == b"%d" % results.index(None)

    # --- missing objects -----------------------------------------------------------------------------------------

    def test_not_found(self, store: Store) -> None:
        for name in ("none", "no/such/object"):
            with pytest.raises(NotFound, match=name):
                store.get(name)
            with pytest.raises(NotFound, match=name), store.open(name) as reader:
                reader.read_into(0, memoryview(bytearray(1)))
            assert not store.exists(name)
        assert object_lengths(store) == {}
        assert object_lengths(store, "no/such") == {}
        assert list(store.list_folders()) == []
        assert list(store.list_folders("no/such")) == []

    def test_a_folder_is_no_object(self, store: Store) -> None:
        store.put("a/b", b"x")
        with pytest.raises(NotFound):
            store.get("a")
        with pytest.raises(NotFound), store.open("a") as reader:
            reader.read_into(0, memoryview(bytearray(1)))
        assert not store.exists("a")
        store.delete(["a"])
        assert store.get("a/b") == b"x"

    def test_nothing_is_below_an_object(self, store: Store) -> None:
        store.put("a", b"x")
        with pytest.raises(NotFound):
            store.get("a/b")
        assert not store.exists("a/b")
        assert object_lengths(store, "a") == {}
        assert list(store.list_folders("a")) == []
        store.delete(["a/b"])
        assert store.get("a") == b"x"

    def test_exists(self, store: Store) -> None:
        store.put("a/b", b"")
        assert store.exists("a/b")
        store.delete(["a/b"])
        assert not store.exists("a/b")

    # --- ranges --------------------------------------------------------------------------------------------------

    def test_ranges(self, store: Store) -> None:
        data = random_bytes(10_000)
        store.put("a", data)
        for position, nbytes in [(0, 10_000), (0, 1), (9_999, 1), (4_095, 2), (1_234, 5_678)]:
            assert read_range(store, "a", position, nbytes) == data[position : position + nbytes]

    def test_range_is_short_at_the_end(self, store: Store) -> None:
        data = random_bytes(10_000)
        store.put("a", data)
        assert read_range(store, "a", 9_000, 5_000) == data[9_000:]
        assert read_range(store, "a", 0, 20_000) == data

    def test_range_past_the_end_is_empty(self, store: Store) -> None:
        store.put("a", random_bytes(100))
        assert read_range(store, "a", 100, 10) == b""
        assert read_range(store, "a", 10_000, 10) == b""
        store.put("empty", b"")
        assert read_range(store, "empty", 0, 10) == b""

    def test_range_into_an_empty_buffer(self, store: Store) -> None:
        store.put("a", random_bytes(100))
        assert read_range(store, "a", 50, 0) == b""

    def test_range_leaves_the_rest_of_the_buffer(self, store: Store) -> None:
        store.put("a", b"abc")
        buffer = bytearray(b"." * 8)
        with store.open("a") as reader:
            assert reader.read_into(1, memoryview(buffer)) == 2
        assert buffer == b"bc......"

    def test_what_is_opened_once_reads_the_same(self, store: Store) -> None:
        data = random_bytes(3_000_000)
        store.put("a", data)
        memory = memoryview(map_huge_pages(1 << 20))
        with store.open_once("a") as reader:
            for position in (0, 4096, 1 << 20, 2 << 20, 5000, len(data), len(data) + 4096):
                for buffer in (memory, memory[1:], memory[:100]):
                    expected = data[position : position + len(buffer)]
                    assert reader.read_into(position, buffer) == len(expected)
                    assert buffer[: len(expected)] == expected
        with pytest.raises(NotFound), store.open_once("none") as reader:
            reader.read_into(0, memory)

    def test_a_prefetch_changes_nothing_and_raises_nothing(self, store: Store) -> None:
        data = random_bytes(3_000_000)
        store.put("a", data)
        store.prefetch("a", len(data))
        store.prefetch("a", 10_000, 2_995_000)
        store.prefetch("a", 10_000, 5_000_000)
        store.prefetch("a", 0)
        store.prefetch("none", 10_000)
        assert store.get("a") == data
        assert not store.exists("none")

    def test_many_threads_read_one_reader(self, store: Store) -> None:
        data = random_bytes(1_000_000)
        store.put("a", data)
        with store.open("a") as reader:

            def read_some(seed: int) -> bool:
                rng = random.Random(seed)
                for _ in range(10):
                    position, buffer = rng.randrange(len(data)), bytearray(rng.randrange(1, 100_000))
                    count = reader.read_into(position, memoryview(buffer))
                    if buffer[:count] != data[position : position + len(buffer)]:
                        return False
                return True

            assert run_simultaneously([lambda i=i: read_some(i) for i in range(8)]) == [True] * 8  # type: ignore[misc]

    # --- writers -------------------------------------------------------------------------------------------------

    def test_appends_are_aligned(self, store: Store) -> None:
        pieces = [random_bytes(nbytes, seed=nbytes) for nbytes in (1, 4096, 5000, 0, 8192, 3)]
        with store.create("a/w") as writer:
            positions = [writer.append(memoryview(piece)) for piece in pieces]
            assert writer.commit() == 6 * ALIGNMENT + 3
        assert positions == [ALIGNMENT * page for page in (0, 1, 2, 4, 4, 6)]
        data = store.get("a/w")
        assert len(data) == 6 * ALIGNMENT + 3
        for position, piece in zip(positions, pieces, strict=True):
            assert data[position : position + len(piece)] == piece
        assert data[1:ALIGNMENT] == bytes(ALIGNMENT - 1), "the gap is not zero"

    @pytest.mark.parametrize("kind", ["odd", "page", "mixed"])
    def test_appends_from_many_threads(self, store: Store, kind: str) -> None:
        """With odd lengths, with whole pages from page-aligned memory (for O_DIRECT), and with both."""

        def random_pieces(thread: int) -> list[memoryview]:
            rng = random.Random(thread)
            pieces = []
            for i in range(6):
                nbytes = rng.randrange(1, 300_000)
                if kind == "page" or (kind == "mixed" and i % 2):
                    nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
                memory = memoryview(mmap(-1, nbytes))
                memory[:] = random_bytes(nbytes, seed=100 * thread + i)
                pieces.append(memory)
            return pieces

        parts = [random_pieces(thread) for thread in range(8)]
        with store.create("a/w", sum(len(piece) for part in parts for piece in part)) as writer:

            def append(part: list[memoryview]) -> list[int]:
                return [writer.append(piece) for piece in part]

            results = run_simultaneously([lambda part=part: append(part) for part in parts])  # type: ignore[misc]
            length = writer.commit()
        positions = [result for result in results if not isinstance(result, StoreError)]
        assert len(positions) == len(parts), results
        data = store.get("a/w")
        assert length == len(data) == object_lengths(store)["a/w"]
        in_order = sorted(
            (position, len(piece), bytes(piece))
            for part, at in zip(parts, positions, strict=True)
            for position, piece in zip(at, part, strict=True)
        )
        end = 0
        for position, nbytes, piece in in_order:
            assert position == -(-end // ALIGNMENT) * ALIGNMENT, "pieces overlap or leave a gap"
            assert data[position : position + nbytes] == piece
            end = position + nbytes
        assert length == end

    @pytest.mark.parametrize("first_bytes", [0, 10, 100_000])
    def test_an_empty_append_adds_nothing(self, store: Store, first_bytes: int) -> None:
        first = random_bytes(first_bytes)
        with store.create("a") as writer:
            pieces = [first, b"", b"last"]
            positions = [writer.append(memoryview(piece)) for piece in pieces]
            length = writer.commit()
        data = store.get("a")
        assert len(data) == length == positions[-1] + 4
        assert (data[:first_bytes], data[positions[-1] :]) == (first, b"last")

    def test_the_length_of_an_append_is_counted_in_bytes(self, store: Store) -> None:
        numbers = array.array("I", range(20_000))
        with store.create("a") as writer:
            writer.append(memoryview(numbers))
            assert writer.commit() == 80_000
        assert store.get("a") == numbers.tobytes()

    def test_an_append_is_copied_before_it_returns(self, store: Store) -> None:
        buffer = bytearray(3_000_000)
        with store.create("a") as writer:
            for value in range(5):
                buffer[:] = bytes([value]) * len(buffer)
                position = writer.append(memoryview(buffer))
                buffer[:] = b"\xff" * len(buffer)
            writer.commit()
        data = store.get("a")
        assert [data[value * (position // 4)] for value in range(5)] == [0, 1, 2, 3, 4]
        assert b"\xff" not in data

    @pytest.mark.parametrize("nbytes", [10, 20 * 1024 * 1024])
    def test_nothing_is_visible_before_commit(self, store: Store, nbytes: int) -> None:
        data = random_bytes(nbytes)
        with store.create("a/b") as writer:
            writer.append(memoryview(data))
            assert object_lengths(store) == {}
            assert not store.exists("a/b")
            with pytest.raises(NotFound):
                store.get("a/b")
            writer.commit()
        assert object_lengths(store) == {"a/b": nbytes}
        assert store.get("a/b") == data

    @pytest.mark.parametrize("nbytes", [0, 10, 20 * 1024 * 1024])
    def test_abort_leaves_nothing(self, store: Store, nbytes: int) -> None:
        writer = store.create("a/b")
        if nbytes:
            writer.append(memoryview(random_bytes(nbytes)))
        writer.abort()
        writer.abort()
        assert object_lengths(store) == {}
        assert not store.exists("a/b")

    def test_leaving_the_context_without_commit_aborts(self, store: Store) -> None:
        with pytest.raises(RuntimeError, match="on purpose"), store.create("a/b") as writer:
            writer.append(memoryview(b"x"))
            raise RuntimeError("on purpose")
        assert object_lengths(store) == {}

    def test_abort_after_commit_is_harmless(self, store: Store) -> None:
        with store.create("a") as writer:
            writer.append(memoryview(b"kept"))
            writer.commit()
            writer.abort()
        assert store.get("a") == b"kept"

    def test_a_finished_writer_takes_no_more(self, store: Store) -> None:
        for finish in ("commit", "abort"):
            writer = store.create("a")
            writer.append(memoryview(b"x"))
            getattr(writer, finish)()
            with pytest.raises(StoreError):
                writer.append(memoryview(b"y"))
            with pytest.raises(StoreError):
                writer.commit()

    def test_empty_object(self, store: Store) -> None:
        with store.create("a") as writer:
            assert writer.commit() == 0
        assert write_object(store, "b", b"") == 0
        assert store.get("a") == store.get("b") == b""
        assert object_lengths(store) == {"a": 0, "b": 0}

    def test_size_hint_binds_to_nothing(self, store: Store) -> None:
        for name, hint in (("more", 1_000_000), ("less", 1)):
            with store.create(name, hint) as writer:
                writer.append(memoryview(b"x" * 5_000))
                assert writer.commit() == 5_000
        assert object_lengths(store) == {"more": 5_000, "less": 5_000}

    def test_a_writer_replaces(self, store: Store) -> None:
        store.put("a", random_bytes(9_999))
        write_object(store, "a", b"new")
        assert store.get("a") == b"new"

    def test_writers_of_different_objects_side_by_side(self, store: Store) -> None:
        results = run_simultaneously([lambda i=i: write_object(store, f"a/{i}", random_bytes(50_000, i)) for i in range(8)])  # type: ignore[misc]
        assert results == [50_000] * 8
        assert all(store.get(f"a/{i}") == random_bytes(50_000, i) for i in range(8))

    # --- listing and deleting ------------------------------------------------------------------------------------

    def test_list_at_any_depth(self, store: Store) -> None:
        objects = {"top": 1, "a/one": 2, "a/b/two": 3, "a/b/c/three": 4, "d/four": 5}
        for name, nbytes in objects.items():
            store.put(name, bytes(nbytes))
        assert object_lengths(store) == objects
        assert object_lengths(store, "a") == {name: nbytes for name, nbytes in objects.items() if name.startswith("a/")}
        assert object_lengths(store, "a/b/c") == {"a/b/c/three": 4}
        assert sorted(store.list_folders()) == ["a", "d"]
        assert sorted(store.list_folders("a")) == ["b"]
        assert sorted(store.list_folders("a/b")) == ["c"]
        assert sorted(store.list_folders("a/b/c")) == []

    def test_prefix_is_a_folder(self, store: Store) -> None:
        for name in ("a/x", "ab/x", "a-b/x", "a.b/x", "abc"):
            store.put(name, b"")
        assert object_lengths(store, "a") == {"a/x": 0}
        assert object_lengths(store, "ab") == {"ab/x": 0}
        assert sorted(store.list_folders()) == ["a", "a-b", "a.b", "ab"]

    def test_list_more_than_one_page(self, store: Store) -> None:
        """A page of S3 has 1,000 names."""
        names = [f"many/{i}" for i in range(1_100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, b"x"), names))
        assert sorted(object_lengths(store, "many")) == sorted(names)
        store.delete(names)
        assert object_lengths(store) == {}

    def test_delete(self, store: Store) -> None:
        for name in ("a/b", "a/c", "d"):
            store.put(name, b"x")
        store.delete(iter(["a/b", "d", "never/was", "nor-this"]))
        assert object_lengths(store) == {"a/c": 1}
        store.delete(["a/b"])
        store.delete([])
        with pytest.raises(NotFound):
            store.get("a/b")

    def test_a_folder_can_come_back(self, store: Store) -> None:
        for _ in range(2):
            store.put("a/b/c", b"x")
            store.delete(["a/b/c"])
        write_object(store, "a/b/c", b"y")
        assert object_lengths(store) == {"a/b/c": 1}

    def test_sweep_removes_no_object(self, store: Store) -> None:
        store.put("a/b", b"x")
        store.sweep_temporaries("")
        store.sweep_temporaries("a")
        store.sweep_temporaries("none")
        store.sweep_temporaries("", folders=False)
        assert object_lengths(store) == {"a/b": 1}

    # --- names ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ["a", "A-b_c.d", "0", "-", "a..b", "a.", "x" * 200, "/".join("abcdefgh")])
    def test_valid_names(self, store: Store, name: str) -> None:
        store.put(name, b"x")
        assert object_lengths(store) == {name: 1}
        assert store.get(name) == b"x"
        assert write_object(store, name, b"yy") == 2
        assert object_lengths(store) == {name: 2}

    @pytest.mark.parametrize("name", INVALID_NAMES)
    def test_invalid_names_are_refused(self, store: Store, name: str) -> None:
        store.put("kept", b"x")
        calls: list[Callable[[], object]] = [
            lambda: store.put(name, b"x"),
            lambda: store.put_new(name, b"x"),
            lambda: store.get(name),
            lambda: store.open(name),
            lambda: store.create(name),
            lambda: store.exists(name),
            lambda: store.delete(["kept-not", name]),
        ]
        if name:  # the empty prefix is the root
            calls += [lambda: list(store.list(name)), lambda: list(store.list_folders(name))]
        for call in calls:
            with pytest.raises(InvalidName):
                call()
        assert object_lengths(store) == {"kept": 1}

    def test_url_names_it_in_messages(self, store: Store) -> None:
        assert store.url in repr(store)
        assert "://" in store.url
