"""SIGKILL at every fail point of a save and of a deletion, and at random moments."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.folders import TESTS, fast_folder
from helpers.processes import SOAK, Killer, finish, python
from helpers.repositories import assert_all_load, assert_clean
from helpers.states import state_of

import ckpt

POINTS = sorted(
    {
        point
        for folder in ("ckpt", "storage")
        for path in (TESTS.parent / folder).rglob("*.py")
        for point in re.findall(r'failpoint\("([\w.]+)"\)', path.read_text())
        if point.partition(".")[0] in ("lease", "save", "delete", "local") and point != "local.read"  # nothing reads packs
    }
)
"""Read from the sources, so that the tests include each fail point that is added."""
MODES = ("blocking", "async", "checkpointer")
SEED = int(os.environ.get("CKPT_SEED", "20240607"))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a server, and identifies processes by /proc")


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as folder:
        yield folder


def check_and_save_next(root: Path, acknowledged: list[int]) -> int:
    """Check all conditions after a kill, save a further step, and return the number of the step after it."""
    steps = assert_all_load(root, acknowledged[-1] if acknowledged else None)
    after = steps[-1] + 1 if steps else 0
    ckpt.save(state_of(after), root, after, keep=2)
    assert_all_load(root, after)
    assert_clean(root)
    return after + 1


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", POINTS)
def test_a_save_killed_at_any_fail_point_leaves_complete_steps(
    killer: Killer, fast: Path, point: str, mode: str, count_cases: CountCases
) -> None:
    """One repository is killed at the first pass of the point, then at the second, and so on."""
    passes = range(1, 100) if SOAK else (1, 2, 3, 5, 8, 13, 21)
    start, hits = 0, 0
    for k in passes:
        spec = f"{point}=kill@{k}"
        outcome = killer.run(url=str(fast / "run"), start=start, count=3, mode=mode, failpoints=spec)
        assert not outcome["error"], (spec, outcome["error"])
        start = check_and_save_next(fast / "run", outcome["acknowledged"])
        if not outcome["killed"]:
            break
        hits += 1
    count_cases(hits)
    assert hits, f"nothing passes the fail point {point}"


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_a_save_killed_at_a_random_moment_leaves_complete_steps(
    killer: Killer, tmp_path: Path, mode: str, count_cases: CountCases
) -> None:
    count = 200 if SOAK else 20
    print(f"CKPT_SEED={SEED}")
    moments = random.Random(f"{SEED} {mode}")
    root = tmp_path / "run"
    start, killed = 0, 0
    for _ in range(count):
        # Most moments are early, during a save; some are later, in the middle of the loop.
        moment = moments.choice((0.02, 0.1, 0.3)) * moments.random()
        outcome = killer.run(url=str(root), start=start, count=1000, mode=mode, kill_after=moment)
        assert not outcome["error"], outcome["error"]
        killed += outcome["killed"]
        start = check_and_save_next(root, outcome["acknowledged"])
    count_cases(killed)
    assert killed == count


def test_a_fail_point_from_the_environment_kills_a_save(tmp_path: Path) -> None:
    """The kill happens in a process of its own by CKPT_FAILPOINTS, as a user would do it."""
    code = """
import sys, ckpt
from helpers.states import state_of
for step in range(5):
    ckpt.save(state_of(step), sys.argv[1], step)
    print(step, flush=True)
"""
    process = python(code, tmp_path / "run", env={"CKPT_FAILPOINTS": "save.commit=kill@3"})
    out, err = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, err
    assert out.split() == ["0", "1"]
    assert assert_all_load(tmp_path / "run", 1) == [0, 1]
    finish(python(code, tmp_path / "other", env={"CKPT_FAILPOINTS": ""}))
    assert check_and_save_next(tmp_path / "run", [0, 1]) == 3


def test_a_kill_while_the_repository_is_created_leaves_it_usable(killer: Killer, tmp_path: Path) -> None:
    """The kill hits the very first files: the marker and the first writer lease."""
    for k in range(1, 12):
        root = tmp_path / str(k)
        outcome = killer.run(url=str(root), start=0, count=1, mode="blocking", failpoints=f"local.fsync=kill@{k}")
        assert not outcome["error"], outcome["error"]
        assert outcome["killed"]
        check_and_save_next(root, outcome["acknowledged"])
