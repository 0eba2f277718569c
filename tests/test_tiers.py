"""Tiers: saves land in the nearest place, are copied on whole, and come back from the nearest good copy.

Whatever is killed, full, flipped or taken over: what was acknowledged is there bit for bit, and no tier lists a step that
does not load.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    FailingStore,
    assert_all_load,
    assert_same,
    failing,
    fast_folder,
    files,
    one_line,
    python,
    reachable,
    state_of,
)
from test_ranks import all_well, on_ranks
from test_two_writers import take_over

import ckpt
from ckpt.format.manifest import Row
from ckpt.groups.base import Group
from ckpt.state.boxes import Box
from ckpt.storage.base.errors import NoSpace
from ckpt.storage.base.store import ALIGNMENT, Store, Writer
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.shared_memory import MemoryStore
from ckpt.tiers.copy_step import _copy_ranges
from ckpt.tiers.manager import drain
from ckpt.tiers.tier_spec import memory_folder_name


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a test keeps its steps."""

    base: Path

    @property
    def run(self) -> Path:
        return self.base / "run"

    @property
    def nvme(self) -> Path:
        return self.base / "nvme"

    @property
    def memory(self) -> Path:
        return self.base / "memory" / memory_folder_name(self.run.as_uri())

    def all(self) -> list[Path]:
        return [self.memory, self.nvme, self.run]

    def open(self, run: Any = None, near: Any = None, **options: Any) -> ckpt.Checkpointer:
        """Every step to memory, every second to the disk, every fourth to the repository of record."""
        tiers = [ckpt.Tier("memory", keep=2), ckpt.Tier(near or self.nvme, every=2, keep=2)]
        return ckpt.Checkpointer(run or self.run, **{"every": 4, "keep": 2, "tiers": tiers, "group": None, **options})

    def steps(self) -> list[list[int]]:
        return [ckpt.open(place).steps() for place in self.all()]

    def check(self) -> None:
        """Every step that a tier lists loads from that tier alone."""
        for place in self.all():
            if (place / "ckpt.json").exists():
                assert_all_load(place)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    with fast_folder(tmp_path) as folder:
        (folder / "memory").mkdir()
        monkeypatch.setenv("CKPT_MEMORY", str(folder / "memory"))
        yield Places(folder)


def train(ck: ckpt.Checkpointer, steps: range) -> None:
    for step in steps:
        ck.step(step, state_of(step))


def leave(ck: ckpt.Checkpointer) -> None:
    """End as a failing program does: what is near stays near."""
    ck._close(False)


# --- the way of a step -----------------------------------------------------------------------------------------


def test_each_place_has_its_own_steps(places: Places) -> None:
    with places.open() as ck:
        for step in range(10):
            ck.step(step, state_of(step))
            ck.wait()
        assert places.steps() == [[8, 9], [7, 9], [3, 7]]
        assert ck.repository.steps() == [3, 7, 8, 9]
        places.check()  # packs of earlier steps that are referred to came along
    assert places.steps() == [[], [7, 9], [7, 9]], "the newest step is in the repository of record, and the memory is free"
    assert {name.split("/")[0] for name in files(places.memory)} == {"ckpt.json", "tier.json", "generations"}
    places.check()
    for place in (places.nvme, places.run):
        assert {name for name in files(place) if name.startswith("steps/")} == reachable(place)


def test_a_save_that_was_asked_for_comes_everywhere(places: Places) -> None:
    with places.open(every=None) as ck:
        assert ck.save(4, state_of(4)).result().step == 4
        ck.wait()
        assert places.steps() == [[4], [4], [4]]


def test_places_that_go_by_time(places: Places) -> None:
    """They take the next step that a nearer one has; the newest comes to the last one in any case."""
    hour, now = timedelta(hours=1), timedelta(0)
    tiers = [ckpt.Tier("memory", keep=3), ckpt.Tier(places.nvme, every=now, keep=None)]
    with ckpt.Checkpointer(places.run, every=hour, tiers=tiers, group=None) as ck:
        for step in range(3):
            ck.step(step, state_of(step))
            ck.wait()
        assert places.steps() == [[0, 1, 2], [0, 1, 2], []]
    assert places.steps() == [[], [0, 1, 2], [2]]
    tiers = [ckpt.Tier("memory", every=hour), ckpt.Tier(places.nvme, every=None)]
    with ckpt.Checkpointer(places.run, every=4, tiers=tiers, group=None) as ck:
        train(ck, range(3, 7))
        ck.wait()
        assert places.steps() == [[3], [0, 1, 2], [2, 3]], "the near one is due because the last one is"
        ck.save(6, state_of(6))
    assert_all_load(places.run, 6)


def test_ranks_that_go_by_time(places: Places) -> None:
    def work(group: Group) -> list[int]:
        tiers = [ckpt.Tier("memory", every="auto")]
        with ckpt.Checkpointer(places.run, every=5, tiers=tiers, group=group, timeout=30) as ck:
            handles = [ck.step(step, shard_of(group.rank, 2, step)) for step in range(12)]
        return [handle.step for handle in handles if handle is not None]

    saved = all_well(on_ranks(2, work))
    assert saved[0] == saved[1]
    assert {0, 4, 9} <= set(saved[0])
    assert ckpt.open(places.run).steps()[-1] == saved[0][-1]


def test_a_restart_finds_what_is_only_in_memory_and_promotes_it(places: Places) -> None:
    ck = places.open()
    for step in range(7):
        ck.step(step, state_of(step))
        ck.wait()
    leave(ck)
    shutil.rmtree(places.run / "steps")  # as if killed before any promotion
    assert places.steps() == [[5, 6], [3, 5], []]
    with places.open() as ck:
        state, start = ck.restore(state_of(0))
        assert start == 7
        assert_same(state, state_of(6))
        ck.wait()
        assert places.steps() == [[5, 6], [3, 5], [3]], "what is due there by its number"
    assert places.steps()[2] == [3, 6]
    places.check()


def test_a_new_machine_has_no_memory(places: Places) -> None:
    with places.open() as ck:
        train(ck, range(6))
    shutil.rmtree(places.memory)
    with places.open() as ck:
        state, start = ck.restore(state_of(0))
        assert start == 6
        assert_same(state, state_of(5))
        train(ck, range(6, 9))
    assert places.steps()[2][-1] == 8
    places.check()


def test_after_a_roll_back_the_later_save_of_a_step_wins(places: Places) -> None:
    with places.open(every=1) as ck:
        for step in range(4):
            train(ck, range(step, step + 1))
            ck.wait()  # else a step may be left out where copying is slower
    with places.open(every=8) as ck:
        ck.restore(state_of(0), step=2)
        changed = {**state_of(3), "name": "again"}
        ck.step(3, changed)
        assert_same(ck.restore(state_of(0))[0], changed)
    assert_same(ckpt.load(places.run), changed)
    with places.open() as ck:
        assert_same(ck.restore(state_of(0))[0], changed)


def test_steps_of_another_repository_are_refused(places: Places) -> None:
    ck = places.open()
    train(ck, range(1))
    leave(ck)
    shutil.rmtree(places.run)
    with pytest.raises(ckpt.InvalidArgument) as told:
        places.open()
    one_line(told, str(places.memory), "not of the one at", "delete the folder")


@pytest.mark.parametrize(
    ("tiers", "word"),
    [
        (lambda p: [ckpt.Tier(p.run)], "have the same URL"),
        (lambda p: [ckpt.Tier("memory"), ckpt.Tier("memory")], "have the same URL"),
    ],
)
def test_a_place_twice(places: Places, tiers: Any, word: str) -> None:
    with pytest.raises(ckpt.InvalidArgument, match=word):
        ckpt.Checkpointer(places.run, tiers=tiers(places), group=None)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("every", value) for value in (0, -1, True, 2.5, "10", "often", timedelta(seconds=-1), [1])),
        *(("keep", value) for value in (False, 1.5, "2")),
        *(("limit", value) for value in (0, -1, True, 1e9, "1GB")),
    ],
)
def test_a_tier_that_makes_no_sense(argument: str, value: Any) -> None:
    say = "use a number of steps" if argument == "keep" else "use a positive number of"
    with pytest.raises(ckpt.InvalidArgument, match=re.escape(f"{argument}={value!r}: {say}")):
        ckpt.Tier("memory", **{argument: value})


def test_a_tier_that_keeps_nothing() -> None:
    with pytest.raises(ckpt.InvalidArgument, match="at least the last step must be kept"):
        ckpt.Tier("memory", keep=0)


def test_a_tier_that_makes_sense() -> None:
    for every in (1, timedelta(0), timedelta(seconds=1), "auto", None):
        ckpt.Tier("memory", every=every, keep=None, limit=1)  # type: ignore[arg-type]
    assert ckpt.Tier("memory", keep=ckpt.Keep(2, every=10)).keep == ckpt.Keep(2, every=10)


def test_without_ckpt_run_memory_is_a_folder_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_MEMORY", raising=False)
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no shared memory")
    memory = Path(f"/dev/shm/ckpt-{os.getuid()}") / memory_folder_name((tmp_path / "run").as_uri())
    try:
        ck = ckpt.Checkpointer(tmp_path / "run", tiers=[ckpt.Tier("memory")], every=100, group=None)
        ck.step(0, state_of(0))
        leave(ck)
        assert_all_load(memory, 0)
        assert memory.parent.stat().st_mode & 0o077 == 0
    finally:
        shutil.rmtree(memory, ignore_errors=True)


# --- killed ----------------------------------------------------------------------------------------------------

KILLED = """
import sys, ckpt
from pathlib import Path
from support import state_of
from test_tiers import Places
with Places(Path(sys.argv[1])).open() as ck:
    _, start = ck.restore(state_of(0))
    for step in range(start, start + 8):
        ck.step(step, state_of(step)).result()
        print(step, flush=True)
    ck.wait()
"""

POINTS = ("promote.pack", "promote.manifest", "promote.commit", "promote.committed", "delete.commit", "delete.packs")


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_killed_at_each_point_of_a_promotion(places: Places) -> None:
    """One run lives through all of them; each start finds the newest acknowledged step."""
    newest = -1
    for number, point in enumerate(POINTS):
        process = python(KILLED, places.base, env={"CKPT_FAILPOINTS": f"{point}=kill@{number % 2 + 1}"})
        out, err = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, (point, err)
        newest = max([newest, *map(int, out.split())])
        places.check()
        with places.open() as ck:
            state, start = ck.restore(state_of(0))
            assert start > newest, point
            assert_same(state, state_of(start - 1) if start else state_of(0))
            leave(ck)
        newest = start - 1
    with places.open() as ck:
        _, start = ck.restore(state_of(0))
        train(ck, range(start, start + 8))
    places.check()
    for place in (places.nvme, places.run):
        assert {name for name in files(place) if name.startswith("steps/")} == reachable(place), "nothing is left over"


def test_drain(places: Places) -> None:
    """What ckpt-run does with the memory of ranks that died."""
    process = python(KILLED, places.base, env={"CKPT_FAILPOINTS": "save.commit=kill@3"})
    out, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err
    assert out.split() == ["0", "1"]
    assert places.steps() == [[0, 1], places.steps()[1], []]
    memory = os.environ["CKPT_MEMORY"]
    assert drain(memory) == f"step 1 was brought from {places.memory.as_uri()} to {places.run.as_uri()}"
    assert_all_load(places.run, 1)
    assert drain(memory) == f"{places.run.as_uri()} has step 1 already"
    shutil.rmtree(places.run)
    assert "could not be drained" in drain(memory)
    (Path(memory) / "other").mkdir()
    shutil.rmtree(places.memory)
    assert drain(memory) == ""


def test_the_memory_of_a_job_that_lives_is_not_drained(places: Places) -> None:
    code = KILLED.replace("ck.wait()", "ck.wait(); sys.stdin.readline()")
    process = python(code, places.base)
    assert process.stdout is not None
    assert process.stdin is not None
    while process.stdout.readline() != "7\n":
        assert process.poll() is None
    assert f"process {process.pid}" in drain(os.environ["CKPT_MEMORY"])
    process.communicate("\n", timeout=60)
    assert process.returncode == 0
    assert_all_load(places.run, 7)


# --- memory from before ----------------------------------------------------------------------------------------


def move_on(places: Places, monkeypatch: pytest.MonkeyPatch, *gone: str) -> Path:
    """The next job has other memory; what was written to before is only read."""
    before = os.environ["CKPT_MEMORY"]
    after = Path(f"{before}-after")
    after.mkdir()
    monkeypatch.setenv("CKPT_MEMORY", str(after))
    monkeypatch.setenv("CKPT_MEMORY_BEFORE", " ".join([*gone, before]))
    return after / places.memory.name


def test_memory_of_before_is_read_until_something_is_newer(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    ck = ckpt.Checkpointer(places.run, every=4, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(7))
    leave(ck)
    old = files(places.memory)
    new = move_on(places, monkeypatch, "ckpt://127.0.0.1:1?redundancy=1x")  # nobody is there
    with ckpt.Checkpointer(places.run, every=4, tiers=[ckpt.Tier("memory")], group=None) as ck:
        state, start = ck.restore(state_of(0))
        assert start == 7
        assert_same(state, state_of(6))
        assert ckpt.open(new).steps() == []
        assert places.memory.as_uri() in [place.url for place in ck.repository.places]
        train(ck, range(7, 8))
        ck.wait()
        assert ckpt.open(new).steps() == [7]
        assert [place.url for place in ck.repository.places] == [new.as_uri(), places.run.as_uri()]
    assert files(places.memory) == old, "nothing was written there"
    assert assert_all_load(places.run, 7)[-1] == 7


def test_a_step_that_only_memory_of_before_has_comes_home(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a job that does nothing but start and end."""
    ck = ckpt.Checkpointer(places.run, every=4, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(6))
    leave(ck)
    move_on(places, monkeypatch)
    with ckpt.Checkpointer(places.run, every=4, tiers=[ckpt.Tier("memory")], group=None) as ck:
        assert ck.restore(state_of(0))[1] == 6
    assert assert_all_load(places.run, 5)[-1] == 5


def test_drain_of_several_memories(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that hold steps the newest counts; what the repository of record has since is not undone."""
    old = os.environ["CKPT_MEMORY"]
    ck = ckpt.Checkpointer(places.run, every=None, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(6))
    leave(ck)
    move_on(places, monkeypatch)
    new = os.environ["CKPT_MEMORY"]
    gone = "ckpt://127.0.0.1:1?redundancy=1x"
    assert "step 5 was brought" in drain(new, old)
    ck = ckpt.Checkpointer(places.run, every=None, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(6, 8))
    leave(ck)
    assert "could not be drained" in drain(gone, new)
    assert ckpt.open(places.run).steps()[-1] == 7
    shutil.rmtree(places.run / "steps" / "7")
    said = drain(new, gone, old)
    assert "step 7 was brought" in said
    assert len(said.splitlines()) == 1, "what is older is not looked at, nor missed"
    assert "has step 7 already, which is newer than step 5" in drain(old)
    assert 5 in ckpt.open(places.run).steps()


def test_an_older_job_cannot_promote_over_a_newer_one(places: Places) -> None:
    """It lives on another host, cut off, and has a memory of its own."""
    with places.open() as ck:
        ck.save(0, state_of(0))
        ck.wait()
        take_over(places.run, 77)
        with failing("promote.pack=sleep:0.3@*"):  # so that a step waits behind the one that is refused
            for step in (1, 2):
                ck.save(step, {**state_of(step), "name": "old"}).result()  # in memory
        with pytest.raises(ckpt.Fenced, match="taken over"):
            ck.wait()
        with pytest.raises(ckpt.Fenced) as told:
            ck.step(3, state_of(3))
        one_line(told, "process 4711 on elsewhere", "stop it")
        with pytest.raises(ckpt.Fenced):
            ck.close()
    assert ckpt.open(places.run).steps() == [0]


# --- full, and failing -----------------------------------------------------------------------------------------


class FullStore(FailingStore):
    """Its packs meet a full disk as long as `full`; others wait for `gate`."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.full = True
        self.gate = threading.Event()
        self.gate.set()
        self.began: list[str] = []

    def create(self, name: str, size_hint: int = 0) -> Writer:
        self.began.append(name)
        self.gate.wait(60)
        if self.full:
            raise NoSpace(f"creating {self.url}/{name} failed: the disk is full: free space or keep fewer steps")
        return super().create(name, size_hint)


def test_a_full_repository_of_record(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on in the nearer tiers; it is told once, and at the end."""
    store = FullStore(LocalStore(places.run))
    ck = places.open(store)
    for step in range(8):
        ck.step(step, state_of(step))
    with pytest.raises(ckpt.SaveFailed, match="the disk is full"):
        ck.wait()
    assert caplog.text.count("could not be promoted") == 1
    ck.step(8, state_of(8))
    with pytest.raises(ckpt.SaveFailed) as told:
        ck.close()
    one_line(told, "promoting to", "the disk is full")
    assert places.steps()[2] == []
    assert places.steps()[0][-1] == 8, "the nearer copy stays"
    store.full = False
    with places.open(store) as ck:
        state, start = ck.restore(state_of(0))
        assert start == 9
        assert_same(state, state_of(8))
    assert_all_load(places.run, 8)


def test_a_full_tier_between_keeps_nothing_from_the_last(places: Places) -> None:
    ck = places.open(near=FullStore(LocalStore(places.nvme)))
    train(ck, range(7))
    with pytest.raises(ckpt.SaveFailed, match=r"promoting to .*nvme.*the disk is full"):
        ck.close()
    assert places.steps()[1:] == [[], [3, 6]]
    assert_all_load(places.run, 6)


@pytest.mark.parametrize("method", ["put", "put_new", "create", "append", "commit", "list"])
def test_a_promotion_that_fails_once_is_tried_again(places: Places, method: str) -> None:
    store = FailingStore(LocalStore(places.run))
    with places.open(store) as ck:
        train(ck, range(3))
        ck.wait()
        store._method, store._at = method, store.calls.get(method, 0) + 1
        ck.step(3, state_of(3))
        ck._require_open().wait()
        for _ in range(2):
            try:
                ck.wait()
            except ckpt.SaveFailed as error:
                assert "injected" in str(error)
        assert store.failed
        ck.wait()
        assert places.steps()[2] == [3]
    places.check()


def test_the_newest_wins(places: Places) -> None:
    """Steps come faster than they can be promoted: those between are skipped, and what is copied is not deleted."""
    store = FullStore(LocalStore(places.run))
    store.full = False
    store.gate.clear()
    with places.open(store, every=1) as ck:
        train(ck, range(1))
        while not store.began:
            threading.Event().wait(0.001)
        for step in range(1, 9):
            ck.step(step, state_of(step)).result()
        assert {0, 7, 8} <= set(places.steps()[0]), "step 0 is being copied, step 8 waits"
        assert not {1, 3, 5} & set(places.steps()[0]), "those between, but for an even one that still comes to the disk"
        store.gate.set()
        ck.wait()
        assert places.steps()[2] == [0, 8]
    places.check()


def test_a_near_place_that_is_full(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    """In the background that step is lost, and the next one goes further; with `blocking` none is."""
    store = FullStore(LocalStore(places.base / "near"))
    with ckpt.Checkpointer(places.run, every=100, tiers=[ckpt.Tier(store)], group=None) as ck:
        ck.save(0, state_of(0), blocking=True)
        assert ckpt.open(places.run).steps() == [0]
        assert caplog.text.count("could not be saved to the tier") == 1
        ck.step(1, state_of(1))
        ck.wait()
        assert ckpt.open(places.run).steps() == [0, 1]
        store.full = False
        ck.step(2, state_of(2))
        ck.step(3, state_of(3))
        assert ckpt.open(places.base / "near").steps()[-1:] in ([2], [3])
    assert assert_all_load(places.run, 3) == [0, 1, 3]


def test_a_small_tmpfs(places: Places, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Really full."""
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting takes root")
    try:
        with ckpt.Checkpointer(places.run, every=100, tiers=[ckpt.Tier(small / "t", keep=5)], group=None) as ck:
            for step in range(12):
                ck.save(step, state_of(step), blocking=True)
            assert ck.repository.steps() == list(range(12))
        assert "the disk is full" in caplog.text
        assert_all_load(places.run, 11)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_the_limit_of_a_tier(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    """No step is lost where it does not fit, and it is said."""
    tiers = [ckpt.Tier("memory", limit=300_000), ckpt.Tier(places.nvme, every=100)]
    with ckpt.Checkpointer(places.run, every=None, tiers=tiers, group=None) as ck:
        for step in range(9):
            ck.step(step, state_of(step)).result()
            held = sum(path.stat().st_size for path in places.memory.glob("steps/**/*.*"))
            assert held <= 300_000
        assert set(ck.repository.steps()) >= {7, 8}
        assert set(places.steps()[1]), "some went on to the next"
        assert "of at most 0.000 GB" in caplog.text
        assert "higher limit=" in caplog.text
    assert_all_load(places.run, 8)


def test_a_tier_that_cannot_be_used_is_left_out(places: Places) -> None:
    """A broken disk must not keep a job from training."""
    places.nvme.write_text("no folder")
    with pytest.warns(UserWarning, match="the tier .*nvme is not used"):
        ck = places.open()
    with ck:
        train(ck, range(5))
        ck.wait()
        assert ckpt.open(places.memory).steps() == [3, 4]
        assert ckpt.open(places.run).steps() == [3]
    shutil.rmtree(places.memory)
    places.memory.write_text("no folder")
    with pytest.warns(UserWarning, match="is not used"):
        ck = places.open()
    with ck:
        assert ck.restore(state_of(0))[1] == 5
        train(ck, range(5, 9))
    assert assert_all_load(places.run, 7) == [4, 7], "its own rhythm holds where nothing is nearer"


def test_a_tier_that_can_only_be_read(places: Places) -> None:
    """As where it is two nodes, and one of them is lost. What is only there is found."""
    ck = places.open()
    train(ck, range(6))
    ck._require_open().wait()
    ck._tiers.wait_ignoring_errors()  # type: ignore[union-attr]
    leave(ck)
    assert [steps[-1] for steps in places.steps()] == [5, 5, 3]
    shutil.rmtree(places.memory)
    broken = FailingStore(LocalStore(places.nvme), "put_new", 1)
    with pytest.warns(UserWarning, match="the tier .*nvme is not used"):
        ck = places.open(near=broken)
    with ck:
        state, start = ck.restore(state_of(0))
        assert start == 6
        assert_same(state, state_of(5))
        train(ck, range(6, 9))
        ck.wait()
    assert broken.failed
    assert assert_all_load(places.run, 8)[-1] == 8
    places.check()


# --- rot -------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int = 10_000) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


def saved_everywhere(places: Places) -> None:
    ck = places.open(every=1)
    for step in (3, 7):
        ck.step(step, state_of(step))
        ck.wait()
    leave(ck)
    assert places.steps() == [[3, 7], [3, 7], [3, 7]]


@pytest.mark.parametrize("kind", ["pack", "manifest/*.parquet", "manifest/*.json", "commit"])
@pytest.mark.parametrize("which", ["memory", "nvme", "run", "memory nvme", "nvme run"])
def test_a_flipped_byte_in_a_tier(places: Places, which: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The step comes from the next one, and the bad copy is not used again."""
    saved_everywhere(places)
    pattern = {"pack": "steps/*/pack/*.pack", "commit": "steps/7/commit.json"}.get(kind, f"steps/7/{kind}")
    for name in which.split():
        for path in getattr(places, name).glob(pattern):
            flip(path)
    for again in (False, True):
        caplog.clear()
        with warnings.catch_warnings(record=True) as told, places.open() as ck:
            warnings.simplefilter("always")
            state, start = ck.restore(state_of(0))
            assert start == 8
            assert_same(state, state_of(7))
            met = not again and which.startswith("memory")
            assert ("bad copy in the tier" in caplog.text) == (met or kind == "commit")
            assert any("is removed" in str(each.message) for each in told) == (met and kind != "commit")
            leave(ck)
    with places.open() as ck:
        train(ck, range(8, 10))
        ck.wait()
        assert_same(ckpt.load(places.memory, step=9), state_of(9))
        assert_same(ckpt.load(places.nvme, step=9), state_of(9))
        leave(ck)


def test_a_flipped_byte_in_the_small_files(places: Places) -> None:
    """Of a near place: what is in its steps does not depend on them."""
    saved_everywhere(places)
    for place in (places.memory, places.nvme):
        for name in ("ckpt.json", "tier.json", "generations/*.json"):
            for path in place.glob(name):
                flip(path, 20)
    with places.open() as ck:
        state, start = ck.restore(state_of(0))
        assert start == 8
        assert_same(state, state_of(7))
        train(ck, range(8, 10))
    places.check()


def test_rot_at_the_same_place_everywhere_falls_back(places: Places) -> None:
    saved_everywhere(places)
    for place in places.all():
        for path in place.glob("steps/7/pack/*.pack"):
            flip(path, 0)
    with places.open() as ck:
        with pytest.warns(UserWarning, match="loaded the older step 3"):
            state, start = ck.restore(state_of(0))
        assert start == 4
        assert_same(state, state_of(3))
        with pytest.raises(ckpt.IntegrityError):
            ck.restore(state_of(0), step=7)
        train(ck, range(4, 8))  # bit for bit the same blocks: they are written anew
    assert_all_load(places.run, 7)


def test_each_block_comes_from_a_good_copy(places: Places) -> None:
    """No tier has a whole step any more, all together have."""
    saved_everywhere(places)
    packs = [sorted(place.glob("steps/7/pack/*.pack")) for place in places.all()]
    size = packs[0][0].stat().st_size
    for number, (path,) in enumerate(packs):
        flip(path, (0, ALIGNMENT, size - ALIGNMENT)[number])
    with places.open() as ck:
        assert_same(ck.restore(state_of(0))[0], state_of(7))
        leave(ck)


def test_rot_is_not_promoted(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    ck = ckpt.Checkpointer(places.run, every=100, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(3))
    ck.wait()
    leave(ck)
    for path in places.memory.glob("steps/2/pack/*.pack"):
        flip(path)
    ck = ckpt.Checkpointer(places.run, every=100, tiers=[ckpt.Tier("memory")], group=None)
    with pytest.raises(ckpt.SaveFailed, match="is damaged"):
        ck.close()
    assert ckpt.open(places.run).steps() == []
    assert "could not be promoted" in caplog.text
    with ckpt.Checkpointer(places.run, every=100, tiers=[ckpt.Tier("memory")], group=None) as ck:
        assert ck.restore(state_of(0))[1] == 2
        train(ck, range(2, 4))
    assert_all_load(places.run, 3)


def test_a_bad_pack_in_the_repository_of_record_is_written_anew(places: Places) -> None:
    """It was found by a load; the next step that needs it brings a good one."""
    saved_everywhere(places)
    for place in (places.memory, places.nvme):
        shutil.rmtree(place)
    bad = [*places.run.glob("steps/*/pack/*.pack")]
    for path in bad:
        flip(path, 0)
    with pytest.raises(ckpt.IntegrityError):
        ckpt.load(places.run)
    with places.open() as ck:
        train(ck, range(8, 9))
    assert_same(ckpt.load(places.run, step=8), state_of(8))


# --- ranks -----------------------------------------------------------------------------------------------------


def shard_of(rank: int, size: int, step: int) -> dict[str, Any]:
    full = np.arange(64 * 100, dtype=np.float64).reshape(64, 100) * (step + 1)
    rows = 64 // size
    return {"w": ckpt.Shard(full[rank * rows : (rank + 1) * rows].copy(), full.shape, (rank * rows, 0)), "step": step}


def test_ranks_save_near_and_load_into_other_layouts(places: Places) -> None:
    def work(group: Group) -> None:
        ck = places.open(group=group)
        for step in range(6):
            ck.step(step, shard_of(group.rank, 4, step)).result()
        ck.wait()
        leave(ck)

    all_well(on_ranks(4, work))
    shutil.rmtree(places.run / "steps")
    assert places.steps()[0] == [4, 5]

    def reload(size: int) -> Any:
        def load(group: Group) -> None:
            ck = places.open(group=group)
            state, start = ck.restore(shard_of(group.rank, size, 0))
            assert start == 6
            assert np.array_equal(state["w"].local, shard_of(group.rank, size, 5)["w"].local)
            ck.step(6, shard_of(group.rank, size, 6))
            ck.close()

        return load

    all_well(on_ranks(2, reload(2)))
    assert np.array_equal(ckpt.load(places.run, step=6)["w"], np.arange(6400.0).reshape(64, 100) * 7)


def test_what_ranks_have_freed_is_no_damage_to_the_next(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    """The record of the last step stays, as a rank may still wait for it, and goes with the next start."""

    def work(group: Group) -> int:
        with ckpt.Checkpointer(places.run, every=1, tiers=[ckpt.Tier("memory")], group=group) as ck:
            _, start = ck.restore(shard_of(group.rank, 2, 0))
            for step in range(start, start + 2):
                ck.step(step, shard_of(group.rank, 2, step))
        return start

    assert all_well(on_ranks(2, work)) == [0, 0]
    assert all_well(on_ranks(2, work)) == [2, 2]
    assert "falling back" not in caplog.text
    assert [path.parent.name for path in places.memory.rglob("commit.json")] == ["3"]


RANK = """
import os, sys, ckpt
from pathlib import Path
from test_tiers import Places, shard_of
rank = int(os.environ["RANK"])
with Places(Path(sys.argv[1])).open(group="auto", timeout=60) as ck:
    state, start = ck.restore(shard_of(rank, 2, 0))
    assert start == 0 or (state["w"].local == shard_of(rank, 2, start - 1)["w"].local).all()
    print("start", start, flush=True)
    for step in range(start, start + int(sys.argv[2])):
        ck.step(step, shard_of(rank, 2, step)).result()
        print(step, flush=True)
"""


def test_ranks_that_are_killed_lose_no_step(places: Places) -> None:
    """Processes that know of each other by the environment alone. Every acknowledged step is found again."""
    newest = -1
    for attempt, (steps, victim) in enumerate(((1000, 1), (1000, 0), (5, None))):
        ranks = [
            python(
                RANK, places.base, steps,
                env={"RANK": str(rank), "WORLD_SIZE": "2", "CKPT_RUN_ID": f"{places.base.name}-{attempt}"},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            lines = [rank.stdout.readline().split() for rank in ranks if rank.stdout]
            assert lines[0] == lines[1] != [], [rank.communicate()[1] for rank in ranks if rank.poll()]
            assert int(lines[0][1]) > newest, "an acknowledged step is lost"
            if victim is None:
                assert [rank.wait(60) for rank in ranks] == [0, 0]
                break
            seen = ranks[1 - victim].stdout
            assert seen is not None
            newest = max(int(seen.readline()) for _ in range(5))
            ranks[victim].kill()
            ranks[1 - victim].kill()
            newest = max([newest, *map(int, seen.read().split())])
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    found = ckpt.open(places.run).steps()
    assert found[-1] == int(lines[0][1]) + 4
    for step in found:
        assert np.array_equal(ckpt.load(places.run, step=step)["w"], np.arange(6400.0).reshape(64, 100) * (step + 1))


def test_ranks_agree_where_to_save_when_a_tier_is_full(places: Places) -> None:
    """One rank meets the full disk; the step is lost there for all, and all go further with the next."""
    stores = [FullStore(LocalStore(places.base / "near")) for _ in range(4)]
    for store in stores[:2] + stores[3:]:
        store.full = False

    def work(group: Group) -> None:
        tiers = [ckpt.Tier(stores[group.rank])]
        ck = ckpt.Checkpointer(places.run, every=100, tiers=tiers, group=group, timeout=30)
        for step in range(6):
            ck.step(step, shard_of(group.rank, 4, step))
        if group.rank == 2:
            stores[2].full = False
        ck.close()

    all_well(on_ranks(4, work))
    assert ckpt.open(places.run).steps()[-1] == 5
    for step in ckpt.open(places.run).steps():
        assert np.array_equal(ckpt.load(places.run, step=step)["w"], np.arange(6400.0).reshape(64, 100) * (step + 1))


def test_ranks_and_the_limit(places: Places) -> None:
    def work(group: Group) -> None:
        tiers = [ckpt.Tier("memory", limit=100_000)]
        ck = ckpt.Checkpointer(places.run, every=100, tiers=tiers, group=group, timeout=30)
        for step in range(5):
            ck.step(step, shard_of(group.rank, 2, step))
        ck.close()

    all_well(on_ranks(2, work))
    assert ckpt.open(places.run).steps()[-1] == 4


# --- pure, and the store ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20_000_000)), max_size=8), st.integers(0, 40_000_000))
def test_the_pieces_of_a_pack_make_it_whole(blocks: list[tuple[int, int]], rest: int) -> None:
    rows, at = [], 0
    for gap, stored in blocks:
        at += gap * ALIGNMENT
        rows.append(Row("x", "u1", (1,), Box((0,), (1,)), "p", at, stored, stored, 0, 1, None, b"", None, b""))
        at += -(-stored // ALIGNMENT) * ALIGNMENT
    nbytes = at + rest
    end = 0
    for begin, stop, row in _copy_ranges(rows, nbytes):
        assert begin == end < stop
        assert begin % ALIGNMENT == 0
        assert row is None or (row.position == begin and row.stored <= stop - begin)
        end = stop
    assert end == nbytes


def test_pages_are_used_again(tmp_path: Path) -> None:
    """A pack is written into the file of one that was deleted; other processes may do so at once."""
    store = MemoryStore(tmp_path)
    data = os.urandom(3 * ALIGNMENT)

    def write(name: str, data: bytes) -> int:
        with store.create(name, len(data)) as writer:
            writer.append(memoryview(data))
            writer.commit()
        assert store.get(name) == data
        return (tmp_path / name).stat().st_ino

    first = write("a/1.pack", data)
    store.delete(["a/1.pack"])
    assert [*store.list()] == []
    assert write("a/2.pack", data[:ALIGNMENT]) == first
    assert write("a/3.pack", data) != first
    store.delete(["a/2.pack"])
    store.delete(["a/3.pack"])
    assert len([*(tmp_path / ".spare").iterdir()]) == 1, "never more than were deleted at once"
    store.sweep_temporaries("")
    assert files(tmp_path) == set()
