"""SIGKILL at every fail point of a copy between tiers, and `drain` after it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from helpers.failing_store import failing
from helpers.messages import one_line
from helpers.processes import python
from helpers.repositories import assert_all_load, files, reachable
from helpers.states import assert_same, state_of
from helpers.tier_folders import TierFolders, close_as_if_failed, switch_memory_folder, train
from helpers.tier_folders import tier_folders as tier_folders
from helpers.two_writers import take_over

import ckpt
from ckpt.storage.base.store import ALIGNMENT
from ckpt.storage.local.shared_memory import MemoryStore
from ckpt.tiers.memory_drain import drain

KILLED = """
import sys, ckpt
from pathlib import Path
from helpers.states import state_of
from helpers.tier_folders import TierFolders
with TierFolders(Path(sys.argv[1])).open() as ck:
    _, start = ck.restore(state_of(0))
    for step in range(start, start + 8):
        ck.step(step, state_of(step)).result()
        print(step, flush=True)
    ck.wait()
"""
POINTS = ("promote.pack", "promote.manifest", "promote.commit", "promote.committed", "delete.commit", "delete.packs")


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_kill_at_any_point_of_a_promotion_loses_no_step(tier_folders: TierFolders) -> None:
    """One run passes all fail points; each start finds the newest acknowledged step."""
    newest = -1
    for number, point in enumerate(POINTS):
        process = python(KILLED, tier_folders.base, env={"CKPT_FAILPOINTS": f"{point}=kill@{number % 2 + 1}"})
        out, err = process.communicate(timeout=600)
        assert process.returncode == -signal.SIGKILL, (point, err)
        newest = max([newest, *map(int, out.split())])
        tier_folders.check()
        with tier_folders.open() as ck:
            state, start = ck.restore(state_of(0))
            assert start > newest, point
            assert_same(state, state_of(start - 1) if start else state_of(0))
            close_as_if_failed(ck)
        newest = start - 1
    with tier_folders.open() as ck:
        _, start = ck.restore(state_of(0))
        train(ck, range(start, start + 8))
    tier_folders.check()
    for place in (tier_folders.nvme, tier_folders.run):
        assert {name for name in files(place) if name.startswith("steps/")} == reachable(place), (
            "a file is left that no step needs"
        )


def test_drain_copies_the_newest_step_of_a_dead_process_once(tier_folders: TierFolders) -> None:
    """ckpt-run drains the memory of ranks that died in this way."""
    process = python(KILLED, tier_folders.base, env={"CKPT_FAILPOINTS": "save.commit=kill@3"})
    out, err = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, err
    assert out.split() == ["0", "1"]
    assert tier_folders.steps() == [[0, 1], tier_folders.steps()[1], []]
    memory = os.environ["CKPT_MEMORY"]
    assert drain(memory) == f"step 1 was brought from {tier_folders.memory.as_uri()} to {tier_folders.run.as_uri()}"
    assert_all_load(tier_folders.run, 1)
    assert drain(memory) == f"{tier_folders.run.as_uri()} has step 1 already"
    shutil.rmtree(tier_folders.run)
    assert "could not be drained" in drain(memory)
    (Path(memory) / "other").mkdir()
    shutil.rmtree(tier_folders.memory)
    assert drain(memory) == ""


def test_the_memory_of_a_live_process_is_not_drained(tier_folders: TierFolders) -> None:
    code = KILLED.replace("ck.wait()", "ck.wait(); sys.stdin.readline()")
    process = python(code, tier_folders.base)
    assert process.stdout is not None
    assert process.stdin is not None
    while process.stdout.readline() != "7\n":
        assert process.poll() is None
    assert f"process {process.pid}" in drain(os.environ["CKPT_MEMORY"])
    process.communicate("\n", timeout=600)
    assert process.returncode == 0
    assert_all_load(tier_folders.run, 7)


def test_the_memory_of_the_previous_job_is_read_until_a_newer_step_exists(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    ck = ckpt.Checkpointer(tier_folders.run, every=4, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(7))
    close_as_if_failed(ck)
    old = files(tier_folders.memory)
    new = switch_memory_folder(tier_folders, monkeypatch, "ckpt://127.0.0.1:1?redundancy=1x")  # no node answers at this address
    with ckpt.Checkpointer(tier_folders.run, every=4, tiers=[ckpt.Tier("memory")], group=None) as ck:
        state, start = ck.restore(state_of(0))
        assert start == 7
        assert_same(state, state_of(6))
        assert ckpt.open(new).steps() == []
        assert tier_folders.memory.as_uri() in [tier.url for tier in ck.repository.tiers]
        train(ck, range(7, 8))
        ck.wait()
        assert ckpt.open(new).steps() == [7]
        assert [tier.url for tier in ck.repository.tiers] == [new.as_uri(), tier_folders.run.as_uri()]
    assert files(tier_folders.memory) == old, "the memory of the previous job was written to"
    assert assert_all_load(tier_folders.run, 7)[-1] == 7


def test_a_step_only_in_the_memory_of_the_previous_job_is_copied_to_the_record(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that only starts and ends copies it to the repository of record."""
    ck = ckpt.Checkpointer(tier_folders.run, every=4, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(6))
    close_as_if_failed(ck)
    switch_memory_folder(tier_folders, monkeypatch)
    with ckpt.Checkpointer(tier_folders.run, every=4, tiers=[ckpt.Tier("memory")], group=None) as ck:
        assert ck.restore(state_of(0))[1] == 6
    assert assert_all_load(tier_folders.run, 5)[-1] == 5


def test_drain_of_several_memories_copies_the_newest_step(tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory with the newest step counts; a newer step in the repository of record is not undone."""
    old = os.environ["CKPT_MEMORY"]
    ck = ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(6))
    close_as_if_failed(ck)
    switch_memory_folder(tier_folders, monkeypatch)
    new = os.environ["CKPT_MEMORY"]
    unreachable = "ckpt://127.0.0.1:1?redundancy=1x"
    assert "step 5 was brought" in drain(new, old)
    ck = ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(6, 8))
    close_as_if_failed(ck)
    assert "could not be drained" in drain(unreachable, new)
    assert ckpt.open(tier_folders.run).steps()[-1] == 7
    shutil.rmtree(tier_folders.run / "steps" / "7")
    report = drain(new, unreachable, old)
    assert "step 7 was brought" in report
    assert len(report.splitlines()) == 1, "an older memory is reported, although it was neither read nor needed"
    assert "has step 7 already, which is newer than step 5" in drain(old)
    assert 5 in ckpt.open(tier_folders.run).steps()


def test_a_fenced_job_promotes_no_step(tier_folders: TierFolders) -> None:
    """The older job runs on another host without a connection, and has a memory of its own."""
    with tier_folders.open() as ck:
        ck.save(0, state_of(0))
        ck.wait()
        take_over(tier_folders.run, 77)
        with failing("promote.pack=sleep:0.3@*"):  # so that a step waits behind the refused one
            for step in (1, 2):
                ck.save(step, {**state_of(step), "name": "old"}).result()  # in memory
        with pytest.raises(ckpt.Fenced, match="taken over"):
            ck.wait()
        with pytest.raises(ckpt.Fenced) as error:
            ck.step(3, state_of(3))
        one_line(error, "process 4711 on elsewhere", "stop it")
        with pytest.raises(ckpt.Fenced):
            ck.close()
    assert ckpt.open(tier_folders.run).steps() == [0]


def test_a_fenced_job_frees_no_memory(tier_folders: TierFolders) -> None:
    """The newer job may have later steps there. `test_tier_simulation.py` found this."""
    ck = ckpt.Checkpointer(tier_folders.run, every=1, tiers=[ckpt.Tier("memory")], group=None)
    train(ck, range(2))
    ck.wait()
    take_over(tier_folders.memory, 77)
    ck.close()
    assert ckpt.open(tier_folders.memory).steps() == [0, 1]


def test_a_new_pack_reuses_the_memory_of_a_deleted_one(tmp_path: Path) -> None:
    """A pack is written into the file of a deleted one; several processes may do so at the same time."""
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
    assert len([*(tmp_path / ".spare").iterdir()]) == 1, "there are more spare files than files deleted at the same time"
    store.sweep_temporaries("")
    assert files(tmp_path) == set()
