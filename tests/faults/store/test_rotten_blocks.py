"""An unchanged block is stored once, and many steps refer to it: damage of it is found, and costs fewer steps with two
copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.flipped_bits import flip_bit
from helpers.states import assert_same

import ckpt
from ckpt.block_io import replicated_store
from ckpt.repository import damage_registry
from ckpt.saving import background_scrub
from ckpt.storage.base.store import Reader
from ckpt.storage.local.directory import LocalStore

FROZEN = np.arange(400_000, dtype=np.float32)


@pytest.fixture(autouse=True)
def _forget_damage() -> Iterator[None]:
    """Clear the damage that this process has recorded."""
    yield
    replicated_store._bad_blocks.clear()
    damage_registry._damaged.clear()


def state(step: int) -> dict[str, Any]:
    """Return a frozen leaf and one that changes, in blocks of their own, as their elements differ in size."""
    return {"frozen": FROZEN, "trained": np.full(1000, step, np.int64)}


def damage_frozen_block(root: Path, step: int) -> str:
    """Change one byte of the block of the frozen leaf to which a step refers; return the name of its pack."""
    row = next(row for row in ckpt.open(root)[step].manifest().rows if row.leaf == "frozen")
    assert row.pack is not None
    flip_bit(root / row.pack, row.position + row.stored // 2)
    return row.pack


def is_whole(root: Path, step: int) -> bool:
    """Return whether a step loads with the right values."""
    try:
        loaded = ckpt.load(root, step=step)
    except ckpt.IntegrityError:
        return False
    return np.array_equal(loaded["frozen"], FROZEN) and loaded["trained"][0] == step


def save_steps(root: Path, steps: range, separate_sessions: bool, **options: Any) -> None:
    """Save these steps, with one writer session for each step or one for all."""
    if separate_sessions:
        for step in steps:
            ckpt.save(state(step), root, step, **options)
        return
    with ckpt.Checkpointer(root, every=None, **options) as ck:
        for step in steps:
            ck.save(step, state(step), blocking=True)


@pytest.mark.parametrize("separate_sessions", [False, True])
def test_with_two_copies_a_damaged_block_costs_every_other_step(tmp_path: Path, separate_sessions: bool) -> None:
    save_steps(tmp_path, range(6), separate_sessions, keep=ckpt.Keep(4, copies=2))
    packs = [damage_frozen_block(tmp_path, 5)]
    assert [is_whole(tmp_path, step) for step in (2, 3, 4, 5)] == [True, False, True, False]
    packs_of_block = {
        row.pack for step in (2, 3, 4, 5) for row in ckpt.open(tmp_path)[step].manifest().rows if row.leaf == "frozen"
    }
    assert len(packs_of_block) == 2, "the block is not stored exactly twice"
    assert packs[0] in packs_of_block
    with pytest.warns(UserWarning, match="older step 4"):
        assert ckpt.load(tmp_path)["trained"][0] == 4


def test_with_one_copy_a_damaged_block_costs_all_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, range(4), False, keep=4)
    damage_frozen_block(tmp_path, 3)
    assert not any(is_whole(tmp_path, step) for step in range(4))


def test_a_second_copy_is_written_where_earlier_steps_share_one(tmp_path: Path) -> None:
    save_steps(tmp_path, range(3), False, keep=4)
    save_steps(tmp_path, range(3, 7), False, keep=ckpt.Keep(4, copies=2))
    damage_frozen_block(tmp_path, 6)
    assert [is_whole(tmp_path, step) for step in (3, 4, 5, 6)] in ([False, True, False, True][::-1], [True, False, True, False])


def test_ranks_keep_two_copies(tmp_path: Path) -> None:
    from ckpt.groups.threads import ThreadGroup

    groups = ThreadGroup.make(2)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with ckpt.Checkpointer(tmp_path, every=None, keep=ckpt.Keep(4, copies=2), group=groups[rank]) as ck:
                for step in range(6):
                    ck.save(step, state(step), blocking=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    damage_frozen_block(tmp_path, 5)
    assert [is_whole(tmp_path, step) for step in (2, 3, 4, 5)] == [True, False, True, False]


@pytest.mark.parametrize(("last", "copies"), [(1, 2), (3, 0), (3, 4)])
def test_more_copies_than_kept_steps_are_refused(last: int, copies: int) -> None:
    with pytest.raises(ckpt.InvalidArgument, match="copies"):
        ckpt.Keep(last, copies=copies)


def test_copies_with_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ckpt.InvalidArgument, match="tiers"):
        ckpt.Checkpointer(tmp_path / "run", keep=ckpt.Keep(3, copies=2), tiers=[ckpt.Tier(tmp_path / "near")])


@pytest.mark.parametrize("has_tiers", [False, True])
def test_after_a_restore_no_save_refers_to_blocks_of_a_damaged_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tiers: bool
) -> None:
    """The restore stops at the first damaged block, so that nobody knows of the other one."""
    monkeypatch.setattr("ckpt.format.pack.PACK_BYTES", 1)
    run, near = LocalStore(tmp_path / "run", direct=False), LocalStore(tmp_path / "near", direct=False)
    stores, tiers = ([near, run], [ckpt.Tier(near)]) if has_tiers else ([run], [])

    def large(step: int) -> dict[str, Any]:
        return {name: np.full(5 << 20, 10 * step + number, np.uint8) for number, name in enumerate("ab")}

    with ckpt.Checkpointer(run, every=None, codec="none", tiers=tiers, scrub=None) as ck:
        for step in (1, 2):
            ck.save(step, large(step), blocking=True)
            ck.wait()
        for store in stores:
            for row in ckpt.open(store)[2].manifest().rows:
                assert row.pack is not None
                flip_bit(Path(store.root) / row.pack, row.position)
        with pytest.warns(UserWarning, match="older step 1"):
            assert ck.restore(large(0))[1] == 2
        ck.save(2, large(2), blocking=True)
    for store in stores:
        assert_same(ckpt.load(store, step=2), large(2))


# --- the scrub in the background ---------------------------------------------------------------------------------


class Watched(LocalStore):
    """A store that counts reads past the page cache, which only the scrub makes while a Checkpointer saves."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = threading.Semaphore(0)
        self.count = 0
        self.hold = threading.Event()
        self.hold.set()

    def open_once(self, name: str) -> Reader:
        self.count += 1
        self.reads.release()
        return super().open_once(name)

    def put(self, name: str, data: Any) -> None:
        assert self.hold.wait(600)
        super().put(name, data)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("the condition is not met within a minute")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scrub begin at once, and repeat without end."""
    monkeypatch.setattr(background_scrub, "FIRST_PASS_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(background_scrub, "PASS_INTERVAL_SECONDS", 0.05)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("options", [{}, {"digest": "blake3"}, {"codec": {"id": "zlib", "level": 1}}])
def test_a_block_damaged_during_a_run_is_found_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    if options.get("digest") == "blake3":
        pytest.importorskip("blake3")
    with ckpt.Checkpointer(tmp_path, every=None, keep=2, scrub=1 << 30, **options) as ck:
        for step in range(3):
            ck.save(step, state(step), blocking=True)
        pack = damage_frozen_block(tmp_path, 2)
        wait_until(lambda: {1, 2} <= damage_registry.damaged_steps(ck.repository))
        ck.save(3, state(3), blocking=True)
        assert not any(file.name == pack for file in ck.repository.commit(3).packs)
        assert is_whole(tmp_path, 3)
        assert ck.repository.steps() == [1, 2, 3], "keep=2 does not keep two complete steps"
    assert pack in caplog.text
    assert "steps 1, 2 of" in caplog.text


@pytest.mark.usefixtures("soon")
def test_the_scrub_pauses_during_a_save(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    with ckpt.Checkpointer(store, every=None, scrub=1 << 30) as ck:  # type: ignore[arg-type]
        for step in range(2):
            ck.save(step, state(step), blocking=True)
        assert store.reads.acquire(timeout=600)
        store.hold.clear()
        handle = ck.save(2, state(2))
        before = store.count
        assert not handle.wait(0.3)
        assert store.count <= before + 1, "the scrub has started more than the one read under way"
        store.hold.set()
        handle.result()
        assert store.reads.acquire(timeout=600)
        wait_until(lambda: store.count > before + 1)


@pytest.mark.usefixtures("soon")
def test_a_run_whose_blocks_all_change_starts_no_scrub(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    with ckpt.Checkpointer(store, every=None, scrub=1 << 30) as ck:  # type: ignore[arg-type]
        for step in range(3):
            ck.save(step, {"trained": np.full(100_000, step)}, blocking=True)
        assert "ckpt-scrub" not in [thread.name for thread in threading.enumerate()]
    assert store.count == 0


@pytest.mark.usefixtures("soon")
def test_a_run_without_the_scrub_option_starts_no_scrub(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    with ckpt.Checkpointer(store, every=None, scrub=None) as ck:  # type: ignore[arg-type]
        for step in range(3):
            ck.save(step, state(step), blocking=True)
        assert "ckpt-scrub" not in [thread.name for thread in threading.enumerate()]
    assert store.count == 0


@pytest.mark.usefixtures("soon")
def test_the_scrub_finds_a_damaged_copy_in_the_repository_of_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    near = ckpt.Tier(tmp_path / "near", every=1, keep=2)
    with ckpt.Checkpointer(tmp_path / "run", every=1, keep=2, tiers=[near], scrub=1 << 30) as ck:
        for step in range(3):
            ck.save(step, state(step), blocking=True)
            ck.wait()
        pack = damage_frozen_block(tmp_path / "run", 2)
        wait_until(lambda: pack in replicated_store.bad_files(ckpt.repository.repository.open_repository(tmp_path / "run").url))
        ck.save(3, state(3), blocking=True)
        ck.wait()
    assert pack in caplog.text
    assert is_whole(tmp_path / "run", 3), "the damaged pack was not copied again from the near tier"
