"""A disk with room for the steps to keep and one more, on which a save was killed: the next save has room."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.lease_writers import elsewhere, put_lease_record
from helpers.processes import finish, python, wait_until_stopped
from helpers.small_disks import small_disk as small_disk

import ckpt
from ckpt.repository.file_names import commit_name
from ckpt.repository.lease_records import newest_generation
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import NoSpace
from ckpt.storage.local.directory import LocalStore

VALUES = 35_000
"""In a step. Three steps fit on the disk of one mebibyte; four do not."""

SAVER = """
import sys
import numpy as np
import ckpt
url, first, after, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if mode == "blocking":
    for step in range(first, after):
        ckpt.save({"w": np.random.default_rng(step).standard_normal(35_000)}, url, step=step, keep=2)
else:
    limit = {"limit": 900_000} if mode == "limit" else {}
    tiers = [ckpt.Tier(near, keep=2, **limit) for near in sys.argv[5:]]
    with ckpt.Checkpointer(url, every=100 if tiers else 1, keep=2, tiers=tiers, group=None) as ck:
        for step in range(first, after):
            ck.step(step, {"w": np.random.default_rng(step).standard_normal(35_000)})
            ck.wait()
"""

RANK = """
import os, sys
import numpy as np
import ckpt
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rows = 35_000 // size
for step in range(int(sys.argv[2]), int(sys.argv[3])):
    whole = np.random.default_rng(step).standard_normal(rows * size)
    part = ckpt.Shard(whole[rank * rows : (rank + 1) * rows].copy(), whole.shape, (rank * rows,))
    ckpt.save({"w": part}, sys.argv[1], step=step, keep=2, timeout=5)
"""


def state_with(seed: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).standard_normal(VALUES)}


def start_saver(url: Path, first: int, after: int, mode: str, *tier: object, failpoints: str = "") -> subprocess.Popen[str]:
    return python(SAVER, url, first, after, mode, *tier, env={"CKPT_FAILPOINTS": failpoints})


def killed(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, errors


def start_ranks(url: Path, first: int, after: int, victim: int = -1, failpoints: str = "") -> list[subprocess.Popen[str]]:
    return [
        python(
            RANK, url, first, after,
            env={"RANK": str(rank), "WORLD_SIZE": "2", "CKPT_FAILPOINTS": failpoints if rank == victim else ""},
        )
        for rank in range(2)
    ]  # fmt: skip


def whole_steps(url: Path) -> list[int]:
    """Return the steps of a repository, after a check of all their bytes."""
    repo = ckpt.open(url)
    for step in repo.steps():
        assert repo[step].verify() > 0
    return repo.steps()


@pytest.mark.parametrize(
    ("mode", "point"),
    [
        ("blocking", "save.manifest"),
        ("loop", "save.commit"),
        ("blocking", "save.committed"),
        ("loop", "delete.files"),
        ("blocking", "delete.packs"),
    ],
)
def test_a_save_has_room_after_one_was_killed(small_disk: Path, mode: str, point: str) -> None:
    run = small_disk / "run"
    finish(start_saver(run, 0, 3, mode))
    killed(start_saver(run, 3, 4, mode, failpoints=f"{point}=kill"))
    first = ckpt.open(run).steps()[-1] + 1
    finish(start_saver(run, first, first + 2, mode))
    assert whole_steps(run) == [first, first + 1]
    assert len(list(run.rglob("*.pack"))) == 2


@pytest.mark.parametrize(("victim", "point"), [(0, "save.manifest"), (0, "ranks.gather"), (1, "ranks.part")])
def test_ranks_have_room_after_one_was_killed(small_disk: Path, victim: int, point: str) -> None:
    run = small_disk / "run"
    for process in start_ranks(run, 0, 3):
        finish(process)
    processes = start_ranks(run, 3, 4, victim, f"{point}=kill")
    killed(processes[victim])
    processes[1 - victim].communicate(timeout=600)
    for step in (3, 4):  # one after the other: a rank that saves again at once may do so before rank 0 has swept
        for process in start_ranks(run, step, step + 1):
            finish(process)
    assert whole_steps(run) == [3, 4]


@pytest.mark.parametrize("mode", ["tier", "limit"])
def test_a_near_tier_has_room_after_a_save_was_killed(small_disk: Path, tmp_path: Path, mode: str) -> None:
    """With a limit of the tier, the files that the killed save has left do not count."""
    run, near = tmp_path / "run", (small_disk if mode == "tier" else tmp_path) / "near"
    finish(start_saver(run, 0, 3, mode, near))
    killed(start_saver(run, 3, 4, mode, near, failpoints="save.manifest=kill"))
    finish(start_saver(run, 3, 4, mode, near))
    assert whole_steps(near) == [2, 3]


def test_a_copy_to_a_full_disk_has_room_after_one_was_killed(small_disk: Path, tmp_path: Path) -> None:
    """The killed job has copied the files of step 3. The next job copies only step 4."""
    run, near = small_disk / "run", tmp_path / "near"
    for step in range(3):
        finish(start_saver(run, step, step + 1, "tier", near))
    killed(start_saver(run, 3, 4, "tier", near, failpoints="promote.commit=kill"))
    finish(start_saver(run, 4, 5, "tier", near))
    assert whole_steps(run)[-1] == 4


def test_a_damaged_record_protects_all_packs_of_a_full_disk(small_disk: Path) -> None:
    """It may name any of them, so nothing is deleted, and the save fails."""
    run = small_disk / "run"
    finish(start_saver(run, 0, 3, "blocking"))
    killed(start_saver(run, 3, 4, "blocking", failpoints="save.manifest=kill"))
    record = run / commit_name(1)
    record.write_bytes(record.read_bytes()[:-40])
    packs = set(run.rglob("*.pack"))
    with pytest.raises(NoSpace):
        ckpt.save(state_with(3), run, 3, keep=2)
    assert set(run.rglob("*.pack")) == packs


def test_a_roll_back_on_a_full_disk_deletes_no_step(small_disk: Path) -> None:
    """Step 0, from which the run continues, would expire by its number. The steps to keep are known only after the commit."""
    run = small_disk / "run"
    for step in range(3):
        ckpt.save(state_with(step), run, step)
    with ckpt.Checkpointer(run, every=1, keep=2, group=None) as ck:
        ck.restore(state_with(9), step=0)
        with pytest.raises(NoSpace):
            ck.save(3, state_with(7), blocking=True)
    assert whole_steps(run) == [0, 1, 2]


def test_saves_continue_after_a_save_that_does_not_fit(small_disk: Path) -> None:
    run = small_disk / "run"
    for step in range(3):
        ckpt.save(state_with(step), run, step)
    with ckpt.Checkpointer(run, every=1, keep=3, group=None) as ck:
        for _ in range(2):
            with pytest.raises(NoSpace):
                ck.save(3, state_with(3), blocking=True)
    ckpt.save(state_with(3), run, 3, keep=2)
    assert whole_steps(run) == [2, 3]


@pytest.mark.parametrize("point", ["save.commit", "local.publish"])
def test_an_earlier_writer_whose_files_made_room_stays_fenced(small_disk: Path, point: str) -> None:
    """It is stopped right before its commit record exists. The next writer takes over, and needs the space of its pack."""
    run = small_disk / "run"
    finish(start_saver(run, 0, 3, "blocking"))
    earlier = start_saver(run, 3, 4, "blocking", failpoints=f"{point}=stop")
    try:
        wait_until_stopped(earlier)
        repo = Repository(LocalStore(run))
        put_lease_record(repo.store, newest_generation(repo), elsewhere())  # else the next writer is refused on this host
        finish(start_saver(run, 3, 5, "blocking"))
        earlier.send_signal(signal.SIGCONT)
        _, errors = earlier.communicate(timeout=600)
    finally:
        earlier.kill()
    assert "was taken over" in errors
    assert whole_steps(run) == [3, 4]
    assert len(list(run.rglob("*.pack"))) == 2
