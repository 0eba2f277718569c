"""Clients, repairs and collections of a namespace stop, continue and are killed, and calls arrive late, as a seed decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import CountCases
from helpers.forked_child import in_forked_child
from helpers.linearizability import is_linearizable, shortest_wrong_prefix
from helpers.namespace_simulation import NamespaceSimulation
from helpers.processes import SOAK
from helpers.seed_search import NOT_FOUND, first_found

from ckpt.aggregator.maintenance import repair
from ckpt.aggregator.records import paxos
from ckpt.storage.registers import sqlite

SEEDS = 5_000 if SOAK else 20


def run(folder: Path, seed: int) -> NamespaceSimulation:
    """Run two or three clients beside repairs and collections. Fail with the seed and the steps where a promise is broken."""
    draw = random.Random(seed)
    simulation = NamespaceSimulation(folder, seed)
    kind = draw.choice(["repairs", "collections", "both"])
    for number in range(draw.choice([2, 3])):
        simulation.add_client(f"client{number}", draw.choice([4, 8]), deletes=1 if kind == "repairs" else 3)
    if kind != "collections":
        simulation.add_repair("repair", draw.choice([1, 6]))
    if kind != "repairs":
        simulation.add_collection("collection", 15)
    try:
        simulation.run()
        for path, calls in simulation.history.items():
            if not is_linearizable(calls):
                wrong = "\n  ".join(map(str, shortest_wrong_prefix(calls)))
                raise AssertionError(f"{path} is not linearizable:\n  {wrong}")
    except AssertionError as error:
        steps = "\n  ".join(simulation.interleaving.steps)
        raise AssertionError(f"seed {seed}: {error}, after these steps:\n  {steps}") from error
    return simulation


def outcome(folder: Path) -> dict[str, int]:
    """Run all seeds, and return how many calls clients made, and of how many they know the outcome."""
    runs = [run(folder / str(seed), seed) for seed in range(SEEDS)]
    calls = [call for each in runs for history in each.history.values() for call in history]
    return {"calls": len(calls), "known": sum(not call.is_unknown for call in calls)}


# What a killed actor had open stays open, so the runs are in children of the test.


@pytest.mark.soak
def test_what_clients_see_is_what_one_register_returns(tmp_path: Path, count_cases: CountCases) -> None:
    found = in_forked_child(lambda: outcome(tmp_path))
    count_cases(SEEDS)
    assert found["known"] > found["calls"] / 2


def test_a_seed_repeats_its_run(tmp_path: Path) -> None:
    first, second = (in_forked_child(lambda name=name: run(tmp_path / name, 7).interleaving.steps) for name in "ab")
    assert first == second


def a_member_forgets_its_promises(patch: pytest.MonkeyPatch) -> None:
    def prepare(self: Any, names: Any, ballot: Any, fence_number: int = 0) -> Any:
        return [sqlite.with_promise(record, ballot) or record for record in self.read(names, fence_number)]

    patch.setattr(sqlite.SqliteRegisters, "prepare", prepare)


def a_half_done_change_counts_as_none(patch: pytest.MonkeyPatch) -> None:
    choose = paxos.choose_values

    def choose_anew(replica_sets: Any, promises: Any, ballot: Any, update: Any) -> Any:
        proposed, update.possibly_accepted = update.possibly_accepted, {}
        try:
            return choose(replica_sets, promises, ballot, update)
        finally:
            update.possibly_accepted = proposed

    patch.setattr(paxos, "choose_values", choose_anew)


def a_repair_begins_no_era(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(repair, "begin_era", lambda namespace: namespace.ring.fence_number)


FOUND_BY = {
    a_member_forgets_its_promises: 9,
    a_half_done_change_counts_as_none: 581,
    a_repair_begins_no_era: 404,
}
"""A seed that finds each fault."""
PROMISES = ("is not linearizable", "can't be read", "are mixed")
"""A part of the message of each broken promise."""


@pytest.mark.parametrize("fault", FOUND_BY, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    found = in_forked_child(lambda: first_found(lambda seed: run(tmp_path / str(seed), seed), PROMISES, FOUND_BY[fault]))
    assert found >= 0, NOT_FOUND
