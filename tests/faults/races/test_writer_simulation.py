"""Writers that stand still, wake up, are killed and take over from each other, in an order that a seed decides."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.interleaving import RandomScheduler
from helpers.processes import SOAK
from helpers.seed_search import NOT_FOUND, first_found
from helpers.writer_simulation import Takeover

from ckpt.errors import Fenced
from ckpt.repository import retention, writer_lease
from ckpt.repository.permanent_steps import Windows
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep
from ckpt.repository.writer_lease import WriterLease
from ckpt.storage.base import fencing_probe
from ckpt.storage.base.conditional_store import ConditionalStore
from ckpt.storage.base.fencing_probe import require_conditional_puts
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore

SEEDS = 5_000 if SOAK else 100
PROMISES = ("has lost", "is lost", "was replaced by", "was committed by")
"""A part of the message of each broken promise."""


def run(kind: str, folder: Path, seed: int) -> Takeover:
    """Run two or three writers. Fail with the seed and the steps where a promise is broken."""
    rng = random.Random(seed)
    keep = rng.choice([None, Keep(1), Keep(2)])
    if keep is not None and random.Random(f"every of {seed}").random() < 0.4:
        keep = replace(keep, every=3)
    takeover = Takeover(kind, folder, RandomScheduler(rng, kills=rng.choice([0.0, 0.01])), keep, seed)
    fault_draw = random.Random(f"faults of {seed}")
    for _ in range(fault_draw.choice([0, 0, 1, 3])):
        takeover.faults.begin(fault_draw, fault_draw.randrange(150))
    for number in range(rng.choice([2, 2, 3])):
        takeover.add_writer(f"writer {number}", rng.choice([1, 2, 3]))
    try:
        errors = takeover.interleaving.run()
        assert not any(errors.values()), errors
    except AssertionError as error:
        steps = "\n  ".join(takeover.interleaving.steps)
        raise AssertionError(f"seed {seed} of {kind}: {error}, after these steps:\n  {steps}") from error
    return takeover


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_takeovers_break_no_promise(kind: str, tmp_path: Path, count_cases: CountCases) -> None:
    runs = [run(kind, tmp_path / str(seed), seed) for seed in range(SEEDS)]
    count_cases(len(runs))
    assert sum(r.commits for r in runs) > len(runs)
    assert sum(r.fenced for r in runs) > len(runs) / 10


def test_a_seed_repeats_its_run(tmp_path: Path) -> None:
    first, second = (run("bucket", tmp_path / name, 7).interleaving.steps for name in "ab")
    assert first == second


def require_found(kind: str, folder: Path, known_seed: int) -> None:
    """Fail unless one of the seeds finds a broken promise."""
    found = first_found(lambda seed: run(kind, folder / str(seed), seed), PROMISES, known_seed)
    assert found >= 0, NOT_FOUND


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_a_fenced_writer_that_commits_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriterLease, "require_newest", lambda _: None)
    require_found(kind, tmp_path, known_seed=0)


def test_a_first_step_of_a_window_that_is_deleted_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Windows, "is_permanent", lambda *_: False)
    require_found("local", tmp_path, known_seed=0)


def test_a_publication_that_is_not_revoked_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConditionalStore, "revoke", lambda *_: True)
    require_found("bucket", tmp_path, known_seed=38)


def test_temporary_files_that_stay_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prepared file of a stopped writer is deleted by the start of the next one, and by its sweep of the step."""
    monkeypatch.setattr(LocalStore, "sweep_temporaries", lambda *_, **__: None)
    monkeypatch.setattr(LocalStore, "revoke", lambda *_: True)
    require_found("local", tmp_path, known_seed=968)


def test_leftovers_that_may_still_be_committed_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_only_uncommittable", lambda _, __, leftovers: leftovers)
    require_found("bucket", tmp_path, known_seed=26)


def test_a_writer_whose_record_is_swept_before_it_was_probed_is_fenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 3 found this. The refusal blamed the store, and recommended to allow writes without fencing."""
    repo = Repository(LocalStore(tmp_path))

    def take_over_before(store: Store, name: str) -> None:
        monkeypatch.undo()
        newer = writer_lease.acquire_lease(repo)
        retention.sweep(repo, newer)
        fencing_probe._probed_urls.clear()
        require_conditional_puts(store, name)

    monkeypatch.setattr(writer_lease, "require_conditional_puts", take_over_before)
    with pytest.raises(Fenced, match="generation 2"):
        writer_lease.acquire_lease(repo)
