"""A block that does not change is stored once, and many steps refer to it. That it rots is found, and costs fewer of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.block_io import replicated_store
from ckpt.repository import damage_registry
from ckpt.saving import background_scrub
from ckpt.storage.base.store import Reader
from ckpt.storage.local.directory import LocalStore

FROZEN = np.arange(400_000, dtype=np.float32)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What is known to be bad belongs to the process."""
    yield
    replicated_store._bad_blocks.clear()
    damage_registry._damaged.clear()


def state(step: int) -> dict[str, Any]:
    """A frozen leaf and one that changes, in blocks of their own: their elements differ in size."""
    return {"frozen": FROZEN, "trained": np.full(1000, step, np.int64)}


def rot(root: Path, step: int) -> str:
    """Change one byte of the block of the frozen leaf that a step refers to; return the name of its pack."""
    row = next(row for row in ckpt.open(root)[step].manifest().rows if row.leaf == "frozen")
    assert row.pack is not None
    with (root / row.pack).open("r+b") as file:
        file.seek(row.position + row.stored // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    return row.pack


def loads(root: Path, step: int) -> bool:
    """Whether a step is whole."""
    try:
        loaded = ckpt.load(root, step=step)
    except ckpt.IntegrityError:
        return False
    return np.array_equal(loaded["frozen"], FROZEN) and loaded["trained"][0] == step


def save_steps(root: Path, steps: range, each_in_a_session_of_its_own: bool, **options: Any) -> None:
    if each_in_a_session_of_its_own:
        for step in steps:
            ckpt.save(state(step), root, step, **options)
        return
    with ckpt.Checkpointer(root, every=None, **options) as ck:
        for step in steps:
            ck.save(step, state(step), blocking=True)


@pytest.mark.parametrize("apart", [False, True])
def test_with_two_copies_a_rotten_block_takes_every_other_step(tmp_path: Path, apart: bool) -> None:
    save_steps(tmp_path, range(6), apart, keep=ckpt.Keep(4, copies=2))
    packs = [rot(tmp_path, 5)]
    assert [loads(tmp_path, step) for step in (2, 3, 4, 5)] == [True, False, True, False]
    held = {row.pack for step in (2, 3, 4, 5) for row in ckpt.open(tmp_path)[step].manifest().rows if row.leaf == "frozen"}
    assert len(held) == 2, "it is written twice, and not once a step"
    assert packs[0] in held
    with pytest.warns(UserWarning, match="older step 4"):
        assert ckpt.load(tmp_path)["trained"][0] == 4


def test_with_one_copy_a_rotten_block_takes_all_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, range(4), False, keep=4)
    rot(tmp_path, 3)
    assert not any(loads(tmp_path, step) for step in range(4))


def test_copies_begin_in_a_repository_with_steps_that_share_one(tmp_path: Path) -> None:
    save_steps(tmp_path, range(3), False, keep=4)
    save_steps(tmp_path, range(3, 7), False, keep=ckpt.Keep(4, copies=2))
    rot(tmp_path, 6)
    assert [loads(tmp_path, step) for step in (3, 4, 5, 6)] in ([False, True, False, True][::-1], [True, False, True, False])


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
    rot(tmp_path, 5)
    assert [loads(tmp_path, step) for step in (2, 3, 4, 5)] == [True, False, True, False]


@pytest.mark.parametrize(("last", "copies"), [(1, 2), (3, 0), (3, 4)])
def test_a_number_of_copies_that_no_kept_step_has_is_refused(last: int, copies: int) -> None:
    with pytest.raises(ckpt.InvalidArgument, match="copies"):
        ckpt.Keep(last, copies=copies)


def test_copies_with_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ckpt.InvalidArgument, match="tiers"):
        ckpt.Checkpointer(tmp_path / "run", keep=ckpt.Keep(3, copies=2), tiers=[ckpt.Tier(tmp_path / "near")])


# --- the scrub in the background ---------------------------------------------------------------------------------


class Watched(LocalStore):
    """Tells of each block that is read past the page cache, as only the scrub does while a Checkpointer saves."""

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
        assert self.hold.wait(60)
        super().put(name, data)


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for a condition."""
    pause = threading.Event()
    for _ in range(6000):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError("it has not come true within a minute")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrub begins at once, and goes on without end."""
    monkeypatch.setattr(background_scrub, "FIRST_PASS_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(background_scrub, "PASS_INTERVAL_SECONDS", 0.05)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("options", [{}, {"digest": "blake3"}, {"codec": {"id": "zlib", "level": 1}}])
def test_a_block_that_rots_while_a_run_goes_on_is_found_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    if options.get("digest") == "blake3":
        pytest.importorskip("blake3")
    with ckpt.Checkpointer(tmp_path, every=None, keep=2, scrub=1 << 30, **options) as ck:
        for step in range(3):
            ck.save(step, state(step), blocking=True)
        pack = rot(tmp_path, 2)
        wait_until(lambda: {1, 2} <= damage_registry.damaged_steps(ck.repository))
        ck.save(3, state(3), blocking=True)
        assert not any(file.name == pack for file in ck.repository.commit(3).packs)
        assert loads(tmp_path, 3)
        assert ck.repository.steps() == [1, 2, 3], "of those that are kept for being good, two must be"
    assert pack in caplog.text
    assert "steps 1, 2 of" in caplog.text


@pytest.mark.usefixtures("soon")
def test_nothing_is_read_again_while_a_save_is_under_way(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    with ckpt.Checkpointer(store, every=None, scrub=1 << 30) as ck:  # type: ignore[arg-type]
        for step in range(2):
            ck.save(step, state(step), blocking=True)
        assert store.reads.acquire(timeout=60)
        store.hold.clear()
        handle = ck.save(2, state(2))
        before = store.count
        assert not handle.wait(0.3)
        assert store.count <= before + 1, "one that had begun is given up"
        store.hold.set()
        handle.result()
        assert store.reads.acquire(timeout=60)
        wait_until(lambda: store.count > before + 1)


@pytest.mark.usefixtures("soon")
def test_a_run_whose_blocks_all_change_reads_nothing_again(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    with ckpt.Checkpointer(store, every=None, scrub=1 << 30) as ck:  # type: ignore[arg-type]
        for step in range(3):
            ck.save(step, {"trained": np.full(100_000, step)}, blocking=True)
        assert "ckpt-scrub" not in [thread.name for thread in threading.enumerate()]
    assert store.count == 0


@pytest.mark.usefixtures("soon")
def test_no_scrub_is_asked_for(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    with ckpt.Checkpointer(store, every=None, scrub=None) as ck:  # type: ignore[arg-type]
        for step in range(3):
            ck.save(step, state(step), blocking=True)
        assert "ckpt-scrub" not in [thread.name for thread in threading.enumerate()]
    assert store.count == 0


@pytest.mark.usefixtures("soon")
def test_a_bad_copy_in_the_repository_of_record_is_found_with_tiers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    near = ckpt.Tier(tmp_path / "near", every=1, keep=2)
    with ckpt.Checkpointer(tmp_path / "run", every=1, keep=2, tiers=[near], scrub=1 << 30) as ck:
        for step in range(3):
            ck.save(step, state(step), blocking=True)
            ck.wait()
        pack = rot(tmp_path / "run", 2)
        wait_until(lambda: pack in replicated_store.bad_files(ckpt.repository.repository.open_repository(tmp_path / "run").url))
        ck.save(3, state(3), blocking=True)
        ck.wait()
    assert pack in caplog.text
    assert loads(tmp_path / "run", 3), "the bad pack is copied once more from the near tier"
