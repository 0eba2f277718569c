"""The bytes of a step are read into the page cache while its load is planned."""

import threading

import numpy as np
import pytest
from helpers.page_cache import cached_pages, drop_cache
from helpers.processes import until
from helpers.values import assert_identical

import ckpt
from ckpt.loading.read_ahead import reading_ahead
from ckpt.storage.local.directory import LocalStore

MIB = 1 << 20


class OneReadAtATime(LocalStore):
    """A local directory whose read-ahead waits for a permission before each read, and lists the positions."""

    def __init__(self, path):
        super().__init__(path)
        self.permissions = threading.Semaphore(0)
        self.positions = []

    def open(self, name):
        reader = super().open(name)
        read_into = reader.read_into

        def read(position, buffer):
            if threading.current_thread().name == "ckpt-read-ahead":
                assert self.permissions.acquire(timeout=600)
                self.positions.append(position)
            return read_into(position, buffer)

        reader.read_into = read
        return reader


def read_ahead_ended():
    return all(thread.name != "ckpt-read-ahead" for thread in threading.enumerate())


@pytest.fixture
def cold(tmp_path):
    """Return a repository whose newest step has 72 MiB on a disk, outside the page cache, and its pack."""
    state = {f"w{i}": np.random.default_rng(i).random(MIB) for i in range(9)}
    repository = tmp_path / "run"
    ckpt.save({"w": np.zeros(3)}, repository, step=1)
    ckpt.save(state, repository, step=2, codec="none")
    (pack,) = (repository / "steps/2").rglob("*.pack")
    drop_cache(pack)
    if any(cached_pages(pack)):
        pytest.skip(f"{tmp_path} is in memory, so its files are always cached")
    return state, repository, pack


def test_a_step_is_read_while_its_load_is_planned(cold):
    _, repository, pack = cold
    with reading_ahead(ckpt.open(repository)[2]):
        until(lambda: all(cached_pages(pack)), "the whole pack is in the page cache")
    until(read_ahead_ended, "the thread has ended")


def test_the_thread_ends_after_its_present_read_once_the_plan_is_made(cold):
    _, repository, _ = cold
    store = OneReadAtATime(repository)
    with reading_ahead(ckpt.open(store)[2]):
        store.permissions.release(2)
        until(lambda: len(store.positions) == 2, "two calls have begun")
    store.permissions.release(10)
    until(read_ahead_ended, "the thread has ended")
    assert store.positions in ([0, 16 * MIB], [0, 16 * MIB, 32 * MIB])  # the third call may have begun before the end


def test_cached_small_and_old_packs_are_not_read_ahead(cold):
    state, repository, pack = cold
    store = OneReadAtATime(repository)
    pack.read_bytes()  # not a load, which may read a part past the page cache
    assert all(cached_pages(pack))
    with reading_ahead(ckpt.open(store)[2]):
        until(read_ahead_ended, "there is nothing to read")
    with reading_ahead(ckpt.open(store)[1]):
        assert read_ahead_ended()
    ckpt.save(state, repository, step=3)  # refers to the pack of step 2
    drop_cache(pack)
    with reading_ahead(ckpt.open(store)[3]):
        assert read_ahead_ended()
    assert store.positions == []


def test_a_load_of_a_whole_step_by_one_process_reads_ahead_and_no_other_does(cold, monkeypatch):
    state, repository, _ = cold
    begun = []

    def recorded(checkpoint):
        begun.append(checkpoint.step)
        return reading_ahead(checkpoint)

    monkeypatch.setattr("ckpt.api.reading_ahead", recorded)
    ckpt.load(repository, step=2, only="w3")
    with ckpt.Checkpointer(repository, every=1) as checkpointer:  # reads past the page cache
        checkpointer.restore({name: np.zeros_like(array) for name, array in state.items()})
    assert begun == []
    assert_identical(ckpt.load(repository, step=2), state)
    assert begun == [2]


def test_a_missing_pack_is_reported_by_the_load(cold):
    _, repository, pack = cold
    pack.unlink()
    with pytest.raises(ckpt.IntegrityError, match=r"steps/2/.*\.pack"):
        ckpt.load(repository, step=2)
    until(read_ahead_ended, "the thread has ended")
