"""A run of several hosts survives kills, pauses, cuts and losses in any order, as a seed decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.campaigns import CountCases
from helpers.processes import SOAK
from helpers.recovery_simulation import RecoverySimulation
from helpers.seed_search import NOT_FOUND, first_found

from ckpt.recovery.agent import end_of_run_drain
from ckpt.recovery.coordinator import transitions
from ckpt.recovery.run_log import run_state

SEEDS = 10_000 if SOAK else 100


def run(seed: int) -> RecoverySimulation:
    """Run one job to its end. Fail with the seed, the steps and the log of the run where a promise is broken."""
    simulation = RecoverySimulation(seed)
    try:
        simulation.run()
    except AssertionError as error:
        steps = "\n  ".join(step for step in simulation.interleaving.steps if not step.endswith(("waits", "reads the log")))
        log = "\n  ".join(f"{entry.at:.2f} {entry.kind}: {entry.text}" for entry in simulation.world.log)
        raise AssertionError(f"seed {seed}: {error}, after these steps:\n  {steps}\nthe log of the run:\n  {log}") from error
    return simulation


@pytest.mark.soak
def test_a_run_continues_from_its_newest_step_and_ends(caplog: pytest.LogCaptureFixture, count_cases: CountCases) -> None:
    caplog.set_level("CRITICAL", "ckpt")
    attempts = [run(seed).world.attempts for seed in range(SEEDS)]
    count_cases(len(attempts))
    assert max(attempts) > 2, "some runs are restarted several times"


def test_a_seed_repeats_its_run() -> None:
    assert run(7).interleaving.steps == run(7).interleaving.steps


def slow_memory_counts_as_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_state.RunState, "memory_wait_seconds", 0.0)


def one_copy_replaces_two(patch: pytest.MonkeyPatch) -> None:
    def is_newer(memories: Any, reports: Any, than_step: int) -> bool:
        return len(memories) > 1 and any(report.saved > than_step for report in reports)

    patch.setattr(transitions.memory_placement, "is_newer", is_newer)


def any_saved_step_counts_as_newer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transitions.memory_placement, "is_newer", lambda memories, reports, step: any(r.saved >= 0 for r in reports))


def a_start_waits_for_no_ranks(patch: pytest.MonkeyPatch) -> None:
    draft = transitions._draft_start

    def draft_at_once(view: Any) -> Any:
        idle = {name: replace(report, doing="idle") for name, report in view.maybe_living.items()}
        return draft(replace(view, maybe_living=idle))

    patch.setattr(transitions, "_draft_start", draft_at_once)


def a_failed_drain_frees_the_memory(patch: pytest.MonkeyPatch) -> None:
    draft = end_of_run_drain.draft_memory
    patch.setattr(end_of_run_drain, "draft_memory", lambda run_state, kept, text: draft(run_state, (), text))


FOUND_BY = {
    slow_memory_counts_as_lost: 84,
    one_copy_replaces_two: 50,
    any_saved_step_counts_as_newer: 50,
    a_start_waits_for_no_ranks: 34,
    a_failed_drain_frees_the_memory: 2,
}
"""A seed that finds each fault."""
PROMISES = ("is restored, and step", "is lost", "others run on")
"""A part of the message of each broken promise."""


@pytest.mark.parametrize("fault", FOUND_BY, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert first_found(run, PROMISES, FOUND_BY[fault]) >= 0, NOT_FOUND
