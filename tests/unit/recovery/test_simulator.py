"""The simulator: its sums are right, committed steps are never lost, it always ends, and Daly's interval is a good one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.recovery.goodput.simulator import (
    FailureKind,
    Outcome,
    Policy,
    World,
    daly_policy,
    simulate,
    simulate_intervals,
)
from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.policy.restart_decision import MAX_REPEATED_FAILURES, Budget, Decision
from ckpt.tools.simulate import command

seconds = st.floats(0, 100)
worlds = st.builds(
    World,
    hosts=st.integers(1, 100),
    host_mtbf_seconds=st.floats(1e4, 1e7),
    step_seconds=st.floats(0.01, 50),
    stall_seconds=seconds,
    durable_seconds=seconds,
    stop_seconds=seconds,
    spawn_seconds=seconds,
    restore_seconds=seconds,
    spares=st.integers(0, 3),
    repair_seconds=st.floats(0, 1e5),
    broken_step=st.none() | st.integers(0, 1000),
)


@settings(max_examples=300, deadline=None)
@given(worlds, st.floats(0.1, 5000), st.floats(0.01, 1), st.integers(0, 3))
def test_a_simulation_of_any_world_is_consistent(world: World, interval: float, days: float, seed: int) -> None:
    found = simulate(world, Policy(interval), days, seed)
    # Every second has a category.
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds, rel=1e-9, abs=1e-6)
    assert min(found.seconds.values()) >= 0
    assert found.wall_seconds <= days * 86400 * (1 + 1e-12)
    # It ends at the end of the simulated days, or with a reason.
    assert bool(found.halt_reason) == (found.decisions["halt"] == 1)
    if not found.halt_reason:
        assert found.wall_seconds == days * 86400
    # Committed steps stay: each attempt continues at least from the step of the one before, and none from an older one.
    assert found.resume_steps == sorted(found.resume_steps)
    assert all(step - 1 <= found.committed <= found.best_step for step in found.resume_steps)
    # Steps take their time. The last step of each stretch may be incomplete.
    stretches = len(found.resume_steps) + found.saves + 2
    for done, spent in ((found.best_step + 1, found.seconds["useful"]), (found.redone_steps, found.seconds["redo"])):
        assert done * world.step_seconds <= spent * (1 + 1e-9) + 1e-6
        assert spent <= (done + stretches) * world.step_seconds * (1 + 1e-9) + 1e-6
    assert found.seconds["stall"] <= (found.saves + len(found.resume_steps) + 1) * world.stall_seconds * (1 + 1e-9) + 1e-6
    assert world.broken_step is None or found.best_step < world.broken_step
    # The same seed gives the same result.
    assert simulate(world, Policy(interval), days, seed) == found


def test_a_program_that_always_fails_is_given_up() -> None:
    found = simulate(World(broken_step=500, host_mtbf_seconds=1e12), daly_policy(World()), 30)
    assert "times in a row, at the same place" in found.halt_reason
    assert found.decisions == {"restart": MAX_REPEATED_FAILURES, "halt": 1}
    assert found.best_step == 499
    assert found.wall_seconds < 3600


def test_without_failures_only_saves_cost() -> None:
    world = World(host_mtbf_seconds=1e15, stall_seconds=1.0, durable_seconds=5.0, step_seconds=1.0)
    found = simulate(world, Policy(99.0), 10)
    assert found.failures == {}
    assert found.redone_steps == 0
    assert found.goodput == pytest.approx(0.99, abs=2e-4)
    assert found.saves == pytest.approx(864_000 / 100, abs=2)


def test_failures_occur_as_often_as_the_mtbf_implies() -> None:
    world = World(
        hosts=100, host_mtbf_seconds=100 * 3600.0, spawn_seconds=0, restore_seconds=0, kinds=(FailureKind("signal", 1, 0),)
    )
    found = [simulate(world, daly_policy(world), 30, seed) for seed in range(10)]
    assert sum(each.failures["signal"] for each in found) == pytest.approx(7200, rel=0.1)


def test_spares_save_the_wait_for_a_repair() -> None:
    kinds = (FailureKind("signal", 1, 1.0, takes_host=True),)
    found = [World(kinds=kinds, repair_seconds=8 * 3600.0, spares=spares) for spares in (0, 2, 20)]
    waits = [simulate(world, daly_policy(world), 30).seconds["wait"] for world in found]
    assert waits[0] > waits[1] > waits[2] == 0


def test_other_decisions_can_be_plugged_in() -> None:
    seen: list[int] = []

    def never(failures: list[Failure], budget: Budget) -> Decision:
        seen.append(len(failures))
        return Decision("halt", "not again")

    found: Outcome = simulate(World(), Policy(60.0, decide=never), 30)  # type: ignore[arg-type]
    assert found.halt_reason == "not again"
    assert seen == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world",
    [
        World(stall_seconds=0.5, host_mtbf_seconds=64 * 3 * 3600.0, spares=4),
        World(stall_seconds=30, durable_seconds=0, host_mtbf_seconds=64 * 3 * 3600.0, spares=4),
        World(stall_seconds=60, durable_seconds=0, host_mtbf_seconds=64 * 1800.0, spares=9),  # where sqrt(2 d m) is too long
    ],
)
def test_dalys_interval_is_nearly_the_best(world: World) -> None:
    points = simulate_intervals(world, days=30, seeds=8)
    best = max(point.goodput for point in points)
    daly = next(point for point in points if point.daly)
    assert daly.goodput > best - 0.003
    assert min(point.goodput for point in points) < best - 0.02, "the interval makes a difference"


def run_simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Return the result of `ckpt-run simulate` with these arguments."""
    words = [sys.executable, "-m", "ckpt.tools.run", "simulate", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_the_command_prints_points_and_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_simulate("--hosts", "512", "--mtbf", "3h", "--days", "3", "--seeds", "2", "--png", str(tmp_path / "s.png"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("← Daly") == 1
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    done = run_simulate("--json", "--days", "3", "--seeds", "2", "--every", "5m", "--every", "250")
    points = json.loads(done.stdout)
    assert [point["interval_seconds"] for point in points if not point["daly"]] == [250, 300]
    assert all(sum(point["seconds"].values()) == pytest.approx(3 * 86400) for point in points)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--mtbf", "soon"], "write seconds, or a time such as"), (["--step", "0"], "--step: give a time above 0")],
)
def test_wrong_arguments_are_usage_errors(arguments: list[str], message: str) -> None:
    done = run_simulate(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_picture_of_a_run_that_loses_no_time_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--stall", "0", "--mtbf", "1000000d", "--every", "1h", "--seeds", "1", "--days", "1"]
    assert command.main([*options, "--png", str(tmp_path / "out.png")], standalone_mode=False) == 0
    assert (tmp_path / "out.png").stat().st_size


def test_a_picture_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """The error is reported before the simulation, not after."""
    pytest.importorskip("matplotlib")
    done = run_simulate("--days", "1e9", "--png", str(tmp_path / "none" / "s.png"))
    message = f"{tmp_path}/none/s.png cannot be written: the folder {tmp_path}/none does not exist; create it first"
    assert (done.returncode, done.stderr) == (1, f"ckpt-run simulate: {message}\n")
