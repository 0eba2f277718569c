"""A run that goes back to an older step and saves on: its steps are the newest, and the steps it left are deleted first."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ckpt
from ckpt.groups.threads import ThreadGroup
from ckpt.repository.damage_registry import damaged_steps
from ckpt.tools import inspect
from ckpt.training.restore_step_limit import RESTORE_STEP_LIMIT_VARIABLE

RESTORED = 110
OLD = (100, 110, 120, 130)


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "weight": np.full(3000, step, np.float32), "frozen": np.arange(5000)}


def save_steps(url: Path, steps: tuple[int, ...], restore: int | None = None, keep: int | None = None, **options: Any) -> None:
    with ckpt.Checkpointer(url, every=None, keep=keep, **options) as ck:
        if restore is not None:
            assert ck.restore(state_of(0), step=restore)[1] == restore + 1
        for step in steps:
            ck.save(step, state_of(step), blocking=True)
            ck.wait()  # until all tiers have it; otherwise they may skip it for the next one


def newest(url: Path) -> int:
    """Return the newest step, and check that all ways to find it agree."""
    with ckpt.Checkpointer(url, every=None, group=None) as ck:
        state, start = ck.restore(state_of(0))
    found = ckpt.open(url).latest()
    assert found is not None
    assert found.step == ckpt.open(url).steps()[-1] == ckpt.load(url, group=None)["step"] == state["step"] == start - 1
    return found.step


@pytest.fixture
def url(tmp_path: Path) -> Path:
    save_steps(tmp_path / "run", OLD)
    return tmp_path / "run"


def test_a_step_saved_after_a_roll_back_is_the_newest(url: Path) -> None:
    save_steps(url, (111, 112, 113, 114), restore=RESTORED, keep=3)
    assert ckpt.open(url).steps() == [112, 113, 114]
    assert newest(url) == 114


def test_abandoned_steps_stay_until_enough_newer_ones_are_good(url: Path) -> None:
    save_steps(url, (111,), restore=RESTORED, keep=3)
    assert ckpt.open(url).steps() == [100, 110, 111]
    save_steps(url, (131, 141), restore=100, keep=4)
    assert ckpt.open(url).steps() == [111, 100, 131, 141]


def test_without_keep_nothing_is_deleted(url: Path) -> None:
    save_steps(url, (111, 112), restore=RESTORED)
    assert ckpt.open(url).steps() == [120, 130, 100, 110, 111, 112]
    assert newest(url) == 112


def test_a_second_job_continues_from_the_steps_after_a_roll_back(url: Path) -> None:
    """The files alone show the roll-back; nothing depends on the memory of the process that rolled back."""
    save_steps(url, (115,), restore=RESTORED)
    assert newest(url) == 115
    save_steps(url, (118,), restore=115)
    assert newest(url) == 118
    lines = {step: ckpt.open(url)[step].commit.line for step in (130, 115, 118)}
    assert lines[115] == lines[118] > lines[130] == 0


def test_a_number_that_was_abandoned_is_saved_again(url: Path) -> None:
    save_steps(url, (115, 120), restore=RESTORED, keep=10)
    assert ckpt.open(url).steps() == [130, 100, 110, 115, 120]
    assert (newest(url), ckpt.load(url, step=120)["weight"][0]) == (120, 120)
    ckpt.save(state_of(130), url, 130)  # without overwrite=True: the existing step 130 was abandoned
    assert ckpt.open(url).steps() == [100, 110, 115, 120, 130]
    with pytest.raises(ckpt.AlreadyExists):
        ckpt.save(state_of(120), url, 120)


def test_the_next_step_number_follows_the_newest_step(url: Path) -> None:
    save_steps(url, (111,), restore=RESTORED)
    assert ckpt.save(state_of(112), url).step == 112


def test_an_abandoned_step_is_restored_by_name(url: Path) -> None:
    save_steps(url, (111,), restore=RESTORED)
    save_steps(url, (131,), restore=130)
    assert ckpt.open(url).steps() == [111, 100, 110, 120, 130, 131]
    assert newest(url) == 131


def test_an_abandoned_step_is_loaded_if_no_newer_one_is_whole(url: Path) -> None:
    save_steps(url, (111,), restore=100, keep=2)
    assert ckpt.open(url).steps() == [100, 111]
    save_steps(url, (120,), restore=100)
    for step in (120, 100):
        for manifest in (url / f"steps/{step}/manifest").iterdir():
            manifest.write_bytes(b"")
    with pytest.warns(UserWarning, match="older step 111"):
        assert ckpt.load(url)["step"] == 111


def test_the_save_after_a_roll_back_references_the_restored_step(url: Path) -> None:
    save_steps(url, (111,), restore=RESTORED)
    steps = {name.split("/")[1] for name in (file.name for file in ckpt.open(url)[111].commit.packs)}
    assert steps == {"100", "111"}, "blocks unchanged since step 100, and new blocks"


def test_a_roll_back_by_ckpt_run_makes_later_steps_the_newest(url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESTORE_STEP_LIMIT_VARIABLE, "120")
    with ckpt.Checkpointer(url, every=None, keep=2) as ck:
        assert ck.restore(state_of(0))[1] == 111
        ck.save(115, state_of(115), blocking=True)
        assert ckpt.open(url).steps() == [110, 115]
    monkeypatch.delenv(RESTORE_STEP_LIMIT_VARIABLE)
    assert newest(url) == 115


@pytest.mark.parametrize("tiers", [0, 1])
def test_a_restore_after_the_saves_that_follow_a_roll_back_is_of_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: int
) -> None:
    """The limit is about the steps that existed when the process began, and not about those that it has saved since."""
    url = tmp_path / "run"
    options: dict[str, Any] = {"every": None, "tiers": [ckpt.Tier(tmp_path / "near", keep=None)] * tiers}
    with ckpt.Checkpointer(url, **options) as ck:
        for step in OLD:
            ck.save(step, state_of(step), blocking=True)
    monkeypatch.setenv(RESTORE_STEP_LIMIT_VARIABLE, "120")
    with ckpt.Checkpointer(url, **options) as ck:
        for _ in range(2):
            assert ck.restore(state_of(0))[1] == 111, "no step was saved since"
        for step in (111, 125):
            ck.save(step, state_of(step), blocking=True)
        assert ck.restore(state_of(0))[1] == 126
        assert 125 not in damaged_steps(ckpt.open(tmp_path / "near" if tiers else url))


def test_a_damaged_step_that_was_passed_over_is_abandoned(url: Path) -> None:
    for manifest in (url / "steps/130/manifest").iterdir():
        manifest.write_bytes(b"")
    with ckpt.Checkpointer(url, every=None) as ck:
        with pytest.warns(UserWarning, match="older step 120"):
            assert ck.restore(state_of(0))[1] == 121
        ck.save(125, state_of(125), blocking=True)
    assert newest(url) == 125


def test_a_lower_step_number_abandons_the_higher_ones(url: Path) -> None:
    save_steps(url, (140, 150, 145), restore=130, keep=3)
    assert ckpt.open(url).steps() == [130, 140, 145]
    assert newest(url) == 145


@pytest.mark.parametrize("has_lines", [False, True])
def test_a_step_number_below_the_restored_one_is_the_newest(tmp_path: Path, has_lines: bool) -> None:
    """A loop counts from 0 again after it has restored the newest step, for example to train on with other data."""
    save_steps(tmp_path, (8, 9, 10))
    if has_lines:
        save_steps(tmp_path, (10,), restore=9)
    save_steps(tmp_path, (0,), restore=10, keep=3)
    assert ckpt.open(tmp_path).steps() == [9, 10, 0]
    assert newest(tmp_path) == 0
    save_steps(tmp_path, (1, 2, 3), restore=0, keep=3)
    assert ckpt.open(tmp_path).steps() == [1, 2, 3]
    assert newest(tmp_path) == 3


def test_a_step_number_equal_to_the_restored_one_replaces_it(tmp_path: Path) -> None:
    save_steps(tmp_path, (8, 9, 10))
    save_steps(tmp_path, (10, 11), restore=10, keep=3)
    assert ckpt.open(tmp_path).steps() == [9, 10, 11]
    assert not (tmp_path / "lines").exists()


def test_a_step_number_of_a_wrong_type_is_refused_after_a_restore(url: Path) -> None:
    with ckpt.Checkpointer(url, every=None) as ck:
        ck.restore(state_of(0))
        ck.save(140, state_of(140), blocking=True)
        with pytest.raises(ckpt.InvalidArgument, match="whole number"):
            ck.save("139", state_of(139))  # type: ignore[arg-type]


def test_concurrent_saves_are_no_roll_back(url: Path) -> None:
    with ckpt.Checkpointer(url, every=None, in_flight=3) as ck:
        for step in (140, 150, 160):
            ck.save(step, state_of(step))
    assert ckpt.open(url).steps() == [*OLD, 140, 150, 160]
    assert not (url / "lines").exists()


# --- a new run beside an old one -----------------------------------------------------------------------------


def test_a_run_that_starts_from_zero_sets_the_old_steps_aside(tmp_path: Path) -> None:
    save_steps(tmp_path, (900, 1000))
    with pytest.warns(UserWarning, match=r"has steps up to step 1000, and step 0 .*Checkpointer\.restore.*new folder"):
        save_steps(tmp_path, (0, 1, 2, 3), keep=2)
    assert ckpt.open(tmp_path).steps() == [900, 1000, 2, 3], "retention does not delete the old steps"
    assert newest(tmp_path) == 3
    save_steps(tmp_path, (4, 5), restore=3, keep=2)
    assert ckpt.open(tmp_path).steps() == [900, 1000, 4, 5], "also not later"
    with pytest.raises(ckpt.AlreadyExists):
        ckpt.save(state_of(900), tmp_path, 900)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [0, 1])
def test_a_loop_that_starts_again_in_one_process_sets_old_steps_aside(tmp_path: Path, tiers: int) -> None:
    """This happens in a notebook: the Checkpointer of the first loop was not closed."""
    url = tmp_path / "run"
    options: dict[str, Any] = {"every": None, "keep": 3, "group": None}
    if tiers:
        options["tiers"] = [ckpt.Tier(tmp_path / "near")]
    before = ckpt.Checkpointer(url, **options)
    for step in (998, 999, 1000):
        before.save(step, state_of(step), blocking=True)
        before.wait()  # a copy to a further tier may skip a step while it waits
    with ckpt.Checkpointer(url, **options) as ck:
        with pytest.warns(UserWarning, match="step 0 is saved without a restore"):
            ck.save(0, state_of(0), blocking=True)
        ck.wait()
        for step in range(1, 6):
            ck.save(step, state_of(step), blocking=True)
            ck.wait()
    assert ckpt.open(url).steps() == [998, 999, 1000, 3, 4, 5]
    before.close()
    assert newest(url) == 5


def test_two_loops_of_one_process_share_a_line(tmp_path: Path) -> None:
    url = tmp_path / "run"
    with ckpt.Checkpointer(url, every=None, group=None) as one, ckpt.Checkpointer(url, every=None, group=None) as other:
        for step, ck in enumerate((one, other, one, other)):
            ck.save(step, state_of(step), blocking=True)
    assert [found.commit.line for found in ckpt.open(url)] == [0, 0, 0, 0]


def test_once_the_old_run_is_restored_the_new_one_is_abandoned(tmp_path: Path) -> None:
    save_steps(tmp_path, (900, 1000))
    with pytest.warns(UserWarning, match="set aside"):
        save_steps(tmp_path, (0, 1))
    save_steps(tmp_path, (1001,), restore=1000, keep=2)
    assert ckpt.open(tmp_path).steps() == [1000, 1001]


def test_a_damaged_record_may_be_one_that_is_set_aside(tmp_path: Path) -> None:
    save_steps(tmp_path, (10, 1000))
    with pytest.warns(UserWarning, match="set aside"):
        save_steps(tmp_path, (9,))
    (tmp_path / "steps/10/commit.json").write_bytes(b"{}")
    save_steps(tmp_path, (20, 30, 40), restore=9, keep=1)
    assert (tmp_path / "steps/10/commit.json").exists()
    assert newest(tmp_path) == 40


# --- several ranks, several tiers ------------------------------------------------------------------------------


def on_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Return what `work` returns on each rank of a group of threads."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, ThreadGroup.make(size)))


def test_all_ranks_agree_on_the_order_after_a_roll_back(url: Path) -> None:
    on_ranks(3, lambda group: save_steps(url, (111, 115, 120), restore=RESTORED, keep=3, group=group))
    assert ckpt.open(url).steps() == [111, 115, 120]
    assert [state["step"] for state in on_ranks(3, lambda group: ckpt.load(url, group=group))] == [120] * 3
    assert [c.step for c in on_ranks(2, lambda group: ckpt.save(state_of(121), url, group=group))] == [121] * 2
    assert newest(url) == 121


@pytest.mark.slow
@pytest.mark.parametrize("memory_is_lost", [False, True])
def test_tiers_follow_a_roll_back(tmp_path: Path, memory_is_lost: bool) -> None:
    url, near = tmp_path / "run", tmp_path / "near"
    tiers = [ckpt.Tier(near, every=10, keep=2)]
    save_steps(url, OLD, keep=3, tiers=tiers)
    save_steps(url, (111, 112), restore=RESTORED, keep=3, tiers=tiers)
    assert newest(url) == 112
    assert ckpt.open(near).latest().step == 112  # type: ignore[union-attr]
    if memory_is_lost:
        for file in sorted(near.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
    with ckpt.Checkpointer(url, every=None, keep=3, tiers=tiers) as ck:
        assert ck.restore(state_of(0))[1] == 113
        ck.save(113, state_of(113), blocking=True)
        assert ck.repository.steps()[-1] == 113
    assert ckpt.open(url).steps()[-3:] == [111, 112, 113]
    assert newest(url) == 113


def test_abandoned_steps_of_a_near_tier_are_not_promoted(tmp_path: Path) -> None:
    """A job ended before step 130 reached the repository of record. The next job goes back to 110."""
    url, tiers = tmp_path / "run", [ckpt.Tier(tmp_path / "near", every=1, keep=None)]
    with pytest.raises(ZeroDivisionError), ckpt.Checkpointer(url, every=1000, tiers=tiers) as ck:
        for step in OLD:
            ck.step(step, state_of(step))
        raise ZeroDivisionError
    with ckpt.Checkpointer(url, every=1000, tiers=tiers) as ck:
        assert ck.restore(state_of(0), step=110)[1] == 111
        ck.step(111, state_of(111))
    assert ckpt.open(url).steps()[-1] == 111
    assert 130 not in ckpt.open(url).steps()
    with ckpt.Checkpointer(url, every=1000, tiers=tiers) as ck:
        assert ck.restore(state_of(0))[1] == 112


# --- files and tools -------------------------------------------------------------------------------------------


def test_records_without_a_roll_back_have_no_fields_of_lines(url: Path) -> None:
    record = json.loads((url / "steps/130/commit.json").read_bytes())
    assert not {"line", "left"} & record.keys()
    assert ckpt.open(url)[130].commit.line == 0


def test_ckpt_inspect_marks_abandoned_steps(url: Path) -> None:
    save_steps(url, (111,), restore=RESTORED)
    done = CliRunner().invoke(inspect.command, [str(url)], standalone_mode=False)
    rows = [line.split() for line in done.output.splitlines() if line and line.split()[0].isdecimal()]
    assert [(row[0], row[-1]) for row in rows[:2]] == [("120", "abandoned"), ("130", "abandoned")]
    assert rows[4][0] == "111"
    printed = json.loads(CliRunner().invoke(inspect.command, [str(url), "--json"], standalone_mode=False).output)
    assert [step["step"] for step in printed["steps"]] == [120, 130, 100, 110, 111]
    assert [step["abandoned"] for step in printed["steps"]] == [True, True, False, False, False]
