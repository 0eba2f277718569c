"""SIGKILL between a base and its differences: at every fail point of a save and of a deletion, and at random moments."""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.drifting_states import assert_drifting_steps_load, drifting_state
from helpers.folders import TESTS, fast_folder
from helpers.processes import SOAK, Killer
from helpers.repositories import assert_clean

import ckpt

POINTS = sorted(
    {
        point
        for folder in ("ckpt/saving", "ckpt/repository")
        for path in (TESTS.parent / folder).rglob("*.py")
        for point in re.findall(r'failpoint\("([\w.]+)"\)', path.read_text())
        if point.partition(".")[0] in ("save", "delete")
    }
)
"""Read from the sources, so that the tests include each fail point that is added."""
MODES = ("blocking", "checkpointer")
SEED = int(os.environ.get("CKPT_SEED", "20261126"))
FULL_EVERY = 3
"""Three saves of a job have a full one, differences to it, and the deletion of the base before."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a server, and identifies processes by /proc")


def check_and_save_next(root: Path, acknowledged: list[int]) -> int:
    """Check all conditions after a kill, save a further step with keep=1, and return the number of the step after it."""
    steps = assert_drifting_steps_load(root, acknowledged[-1] if acknowledged else None)
    after = steps[-1] + 1 if steps else 0
    ckpt.save(drifting_state(after), root, after, keep=1, full_every=FULL_EVERY)
    assert_drifting_steps_load(root, after)
    assert_clean(root)
    return after + 1


def has_differences(root: Path) -> bool:
    """Return whether a step of the repository has a difference."""
    return any(row.base is not None for step in ckpt.open(root) for row in step.manifest().rows)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", POINTS)
def test_a_save_of_differences_killed_at_any_fail_point_leaves_complete_steps(
    killer: Killer, tmp_path: Path, point: str, mode: str, count_cases: CountCases
) -> None:
    with fast_folder(tmp_path) as fast:
        start, hits, seen = 0, 0, False
        for k in range(1, 60) if SOAK else (1, 2, 3, 5, 8):
            spec = f"{point}=kill@{k}"
            outcome = killer.run(
                url=str(fast / "run"), start=start, count=4, mode=mode, failpoints=spec, keep=1, full_every=FULL_EVERY
            )
            assert not outcome["error"], (spec, outcome["error"])
            start = check_and_save_next(fast / "run", outcome["acknowledged"])
            seen = seen or has_differences(fast / "run")
            if not outcome["killed"]:
                break
            hits += 1
        count_cases(hits)
        assert hits, f"nothing passes the fail point {point}"
        assert seen, "no step had a difference"


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_a_save_of_differences_killed_at_a_random_moment_leaves_complete_steps(
    killer: Killer, tmp_path: Path, mode: str, count_cases: CountCases
) -> None:
    print(f"CKPT_SEED={SEED}")
    moments = random.Random(f"{SEED} {mode}")
    start, killed, count = 0, 0, 100 if SOAK else 10
    for _ in range(count):
        moment = moments.choice((0.05, 0.2, 0.5)) * moments.random()
        outcome = killer.run(
            url=str(tmp_path / "run"), start=start, count=1000, mode=mode, kill_after=moment, keep=1, full_every=FULL_EVERY
        )
        assert not outcome["error"], outcome["error"]
        killed += outcome["killed"]
        start = check_and_save_next(tmp_path / "run", outcome["acknowledged"])
    count_cases(killed)
    assert killed == count
