"""Keep(every=N) keeps the first saved step of each N step numbers, whatever was saved, rolled back or damaged."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from helpers.lease_writers import Events
from helpers.swept_repositories import events, lease, repo
from helpers.written_steps import attempt_files, put_step

from ckpt.format.training_lines import TrainingLine, order_steps
from ckpt.repository.file_names import commit_name
from ckpt.repository.permanent_steps import Windows
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep, expired_steps, sweep
from ckpt.repository.writer_lease import WriterLease
from ckpt.storage.base.errors import StoreError

__all__ = ["events", "lease", "repo"]

SEEDS = range(100)


@dataclass
class Run:
    """A training run in a model of a repository: what it saves, what each save continues from, and what exists."""

    rng: random.Random
    keep: Keep
    lines: dict[int, TrainingLine] = field(default_factory=dict)
    """The line of each existing step."""
    paths: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Of the last save of each number: line and number of all saves that led to it, and of itself."""
    saves: set[tuple[int, int]] = field(default_factory=set)
    """Line and number of all saves."""
    damaged: set[int] = field(default_factory=set)
    at: int = -1
    line: TrainingLine = field(default_factory=TrainingLine)

    def save(self) -> None:
        """Save a later step: the next one, one at the interval of a loop that counts from 0, or any."""
        path, style = self.paths.get(self.at, ()), self.rng.randrange(4)
        self.at += (1, 10 - (self.at + 1) % 10, self.rng.randint(1, 6), self.rng.randint(1, 60))[style]
        self.lines[self.at] = self.line
        self.paths[self.at] = (*path, (self.line.number, self.at))
        self.saves.add((self.line.number, self.at))
        self.damaged.discard(self.at)

    def roll_back(self) -> None:
        """Restore any existing step."""
        order = order_steps(self.lines)
        self.at = self.rng.choice(sorted(self.lines))
        if self.at == order.steps[-1]:
            self.line = self.lines[self.at]
        else:
            self.line = order.newest_line.after_rollback(order.newest_line.number + 1, self.lines[self.at], self.at)

    def retain(self) -> None:
        """Delete what has expired."""
        for step in expired(self.lines, self.damaged, self.keep):
            del self.lines[step]
            self.damaged.discard(step)

    def overwritten(self, line: int, step: int) -> bool:
        """Return whether a later save of the same number has replaced a step."""
        return self.paths[step][-1][0] != line

    def exists(self, save: tuple[int, int] | None) -> bool:
        """Return whether a save exists, and was not replaced."""
        return save is not None and save[1] in self.lines and self.lines[save[1]].number == save[0]

    def neighbour_of(self, step: int) -> tuple[int, int] | None:
        """Return the save on the path of a step that is one below the multiple at which its window begins."""
        below = step - step % (self.keep.every or 1) - 1
        return next((save for save in self.paths[step] if save[1] == below), None)

    def firsts(self, path: tuple[tuple[int, int], ...]) -> set[tuple[int, int]]:
        """Return the saves of a path that are the first of their window; all of them were whole."""
        every, found = self.keep.every or 1, dict[int, tuple[int, int]]()
        for line, step in path:
            multiple = self.lines.get(step + 1)
            stands_for_next = (step + 1) % every == 0 and (multiple is None or multiple.number != line)
            found.setdefault((step + stands_for_next) // every, (line, step))
        return {*found.values(), *((line, step) for line, step in path if step % every == 0)}


def expired(lines: dict[int, TrainingLine], damaged: set[int], keep: Keep, whole: set[int] | None = None) -> list[int]:
    """Return the expired steps, as a sweep finds them. whole: those that are known to be so; None for all but the damaged."""
    order, known_whole = order_steps(lines), lines.keys() - damaged if whole is None else whole
    windows = Windows(keep.every or 1, lines, order.newest_line, damaged)
    return expired_steps(
        lines, [step for step in order.steps if step in known_whole], keep, order.steps,
        lambda step: windows.is_permanent(step, known_whole.__contains__),
    )  # fmt: skip


def new_run(seed: int) -> Run:
    rng = random.Random(seed)
    print(f"seed {seed}")
    return Run(rng, Keep(rng.choice([1, 1, 2, 3, 5]), every=rng.choice([1, 2, 5, 10, 20, 20, 37, 100])))


@pytest.mark.parametrize("after_each", [True, False])
def test_of_each_window_the_first_step_is_kept_and_no_other(after_each: bool) -> None:
    for seed in SEEDS:
        run = new_run(seed)
        for _ in range(run.rng.randint(1, 60)):
            run.save()
            if after_each:
                run.retain()
        run.retain()
        path = run.paths[run.at]
        last = {step for _, step in path[-run.keep.last :]}
        assert set(run.lines) == {step for _, step in run.firsts(path)} | last, f"seed {seed}"
        every = run.keep.every or 1
        for begin in {step - step % every for _, step in path}:
            assert run.lines.keys() & {*range(begin - 1, begin + every)}, f"seed {seed}: nothing is kept from {begin} on"


def test_retention_after_each_save_and_at_the_end_keep_the_same() -> None:
    for seed in SEEDS:
        kept = []
        for after_each in (True, False):
            run = new_run(seed)
            for _ in range(60):
                run.save()
                if after_each:
                    run.retain()
            run.retain()
            kept.append(set(run.lines))
        assert kept[0] == kept[1], f"seed {seed}"


@pytest.mark.slow
def test_a_step_that_was_the_first_of_its_window_is_never_deleted() -> None:
    """Whatever is saved or rolled back after it: also if it is abandoned, only a save of the same number replaces it."""
    for seed in SEEDS:
        run, firsts = new_run(seed), set[tuple[int, int]]()
        every = run.keep.every or 1
        for _ in range(120):
            if run.lines and run.rng.random() < 0.1:
                run.roll_back()
            run.save()
            firsts |= {save for save in run.firsts(run.paths[run.at]) if run.exists(save)}
            run.retain()
            gone = {save for save in firsts if not run.overwritten(*save) and not run.exists(save)}
            # A step below a multiple yields to it if it is saved next, and counts again once another line has replaced that.
            gone = {(line, step) for line, step in gone if (step + 1) % every or (line, step + 1) not in run.saves}
            assert all(run.exists(run.neighbour_of(step)) for _, step in gone), f"seed {seed}: {gone}"


@pytest.mark.slow
def test_damage_is_survived_by_the_next_step_of_the_window_that_still_exists() -> None:
    for seed in SEEDS:
        run = new_run(seed)
        every = run.keep.every or 1
        for _ in range(120):
            if run.lines and run.rng.random() < 0.05:
                run.roll_back()
            run.save()
            if run.rng.random() < 0.2:
                run.damaged.add(run.rng.choice(sorted(run.lines)))
            before = dict(run.lines)
            live = [step for step in order_steps(before).history() if step not in run.damaged]
            run.retain()
            for step in live:
                same = {t for t in live if t // every == step // every or t + 1 == step - step % every}
                assert same & run.lines.keys(), f"seed {seed}: of {sorted(same)}, none is left"
            whole = before.keys() - run.damaged
            assert not whole or whole & run.lines.keys(), f"seed {seed}"


def test_what_is_not_known_to_be_whole_deletes_no_further_step() -> None:
    for seed in SEEDS:
        run = new_run(seed)
        for _ in range(60):
            if run.lines and run.rng.random() < 0.1:
                run.roll_back()
            run.save()
        everything, whole = set(expired(run.lines, set(), run.keep)), set(run.lines)
        while whole:
            whole.discard(run.rng.choice(sorted(whole)))
            fewer = set(expired(run.lines, set(), run.keep, whole))
            assert fewer <= everything, f"seed {seed}: {fewer - everything}"
            everything = fewer


# --- a sweep -------------------------------------------------------------------------------------------------------


def swept(repo: Repository, lease: WriterLease, keep: Keep, damaged: Collection[int] = ()) -> list[int]:
    sweep(repo, lease, keep, damaged_steps=damaged)
    return repo.step_numbers()


@pytest.mark.parametrize("after_each", [True, False])
def test_a_sweep_keeps_the_first_step_of_each_window(repo: Repository, lease: WriterLease, after_each: bool) -> None:
    for step in (7, 31, 44, 58, 93, 101, 107, 165, 304, 311, 399, 404, 420, 421):
        put_step(repo.store, step)
        if after_each:
            sweep(repo, lease, Keep(2, every=100))
    assert swept(repo, lease, Keep(2, every=100)) == [7, 101, 304, 399, 420, 421]


def test_if_the_first_step_of_a_window_is_damaged_the_next_one_is_kept_too(repo: Repository, lease: WriterLease) -> None:
    for step in (103, 121, 130, 142, 150):
        put_step(repo.store, step)
    assert swept(repo, lease, Keep(1, every=100), {103}) == [103, 121, 150]
    assert swept(repo, lease, Keep(1, every=100), {103, 121}) == [103, 150], "it was the substitute of one, and is damaged"


@pytest.mark.parametrize("damage", ["no manifest", "damaged record"])
def test_a_first_step_whose_files_are_damaged_does_not_count(repo: Repository, lease: WriterLease, damage: str) -> None:
    for step in (103, 121, 130, 142, 150):
        put_step(repo.store, step)
    if damage == "no manifest":
        repo.store.delete([attempt_files(103, "0-1-0")[0]])
    else:
        repo.store.put(commit_name(103), b"damaged")
    sweep(repo, lease, Keep(1, every=100))
    assert {step for step in repo.step_numbers() if commit_name(step) in repo_files(repo)} == {103, 121, 150}


def repo_files(repo: Repository) -> set[str]:
    return {entry.name for entry in repo.store.list("steps")}


def test_no_step_is_deleted_because_of_a_first_step_that_can_not_be_read(
    repo: Repository, lease: WriterLease, events: Events
) -> None:
    for step in (103, 121, 130, 150):
        put_step(repo.store, step)

    def fail() -> None:
        raise StoreError("no answer")

    events.before(f"get {commit_name(103)}", fail)
    sweep(repo, lease, Keep(1, every=100))
    assert {name for name in repo_files(repo) if name.endswith("commit.json")} == {commit_name(s) for s in (103, 121, 150)}
    assert swept(repo, lease, Keep(1, every=100)) == [103, 150], "it can be read again"


def test_after_a_roll_back_each_line_has_a_first_step(repo: Repository, lease: WriterLease) -> None:
    """Steps 107 and 120 are abandoned. The first of them is kept, and so is the first step of the new line."""
    for step in (90, 98, 107, 120):
        put_step(repo.store, step)
    line = TrainingLine(1, ((0, 98),))
    repo.record_line(line)
    for step in (111, 118, 125, 130):
        put_step(repo.store, step, line=line)
    assert swept(repo, lease, Keep(1, every=100)) == [90, 107, 111, 130]
