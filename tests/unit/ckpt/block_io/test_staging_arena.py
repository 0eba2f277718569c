"""The staging arena: its regions never overlap, and its memory is used again."""

import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.block_io import staging_arena
from ckpt.block_io.staging_arena import Arena, ArenaAbandoned, ArenaPool


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60), order=st.randoms(use_true_random=False))
def test_regions_of_an_arena_never_overlap(sizes, order):
    arena = Arena(32 * 4096)
    taken = []
    for n in sizes:
        while (region := arena.take(n * 4096 - 7, wait=False)) is None:
            assert taken, "an empty arena must have room"
            back, mark = taken.pop(order.randrange(len(taken)))
            assert (back.data == mark).all()
            arena.give_back(back)
        mark = len(taken) % 251
        region.data[:] = mark
        taken.append((region, mark))
    for region, mark in taken:
        assert (region.data == mark).all()
        arena.give_back(region)
    assert arena.take(32 * 4096, wait=False) is not None
    del taken, region
    arena.close()


def test_a_full_arena_waits_for_room_or_for_the_end():
    arena = Arena(4 * 4096)
    first, second = arena.take(4 * 4096), []
    waiter = threading.Thread(target=lambda: second.append(arena.take(4096)))
    waiter.start()
    arena.give_back(first)
    waiter.join(600)
    assert second[0].data.nbytes == 4096
    assert arena.take(4 * 4096, wait=False) is None
    ended = []

    def wait_for_the_end():
        with pytest.raises(ArenaAbandoned):
            arena.take(4 * 4096)
        ended.append(True)

    waiter = threading.Thread(target=wait_for_the_end)
    waiter.start()
    arena.abandon()
    waiter.join(600)
    assert ended
    with pytest.raises(ValueError, match="does not fit"):
        arena.take(5 * 4096)


def test_arenas_are_reused():
    pool = ArenaPool()
    arena = pool.borrow(100_000)
    pool.give_back(arena)
    assert pool.borrow(50_000) is arena
    other = pool.borrow(50_000)
    assert other is not arena
    pool.give_back(arena)
    pool.give_back(other)
    pool.clear()
    assert pool.borrow(10) is not arena


def test_arena_memory_starts_on_a_page():
    arena = Arena(1 << 20)
    assert arena.memory.ctypes.data % 4096 == 0
    assert arena.take(5).data.ctypes.data % 4096 == 0


def test_two_threads_prepare_an_arena_at_once_without_a_deadlock(monkeypatch):
    """If each call starts a thread, no thread may wait for the other one."""
    pool, started, lock, calls_meet, calls_ended = ArenaPool(), [], threading.Lock(), threading.Barrier(2), threading.Event()

    def start(thread):
        with suppress(threading.BrokenBarrierError):
            calls_meet.wait(1)
        with lock:
            started.append(thread)
            number = len(started)
        while number == 2 and pool._preparing is not started[0]:
            time.sleep(0.001)
        thread.daemon = True
        thread.start()
        time.sleep(0.2 if number == 2 else 0)  # the second thread waits for the first one, if it does
        return True

    def prepare(*args):
        if threading.current_thread() is started[0]:
            assert calls_ended.wait(300)
        ArenaPool._prepare(pool, *args)

    monkeypatch.setattr(staging_arena, "try_start", start)
    monkeypatch.setattr(pool, "_prepare", prepare)
    callers = [threading.Thread(target=pool.prepare, args=(100_000,)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(300)
    calls_ended.set()
    for thread in started:
        thread.join(300)
    assert not any(thread.is_alive() for thread in started)
    assert pool.borrow(100_000).capacity_bytes >= 100_000
    pool.clear()
