"""`codec="auto"` stores differences where they halve the time of a save, and not elsewhere."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.drifting_states import assert_drifting_steps_load, base_of_weights, drifting_state, pack_step, weight_row
from helpers.repositories import assert_clean
from helpers.slow_stores import take_for_slow

import ckpt
from ckpt.format.codec_choice import FASTER
from ckpt.format.difference_choice import NOT_HALF
from ckpt.format.json_records import encode_commit
from ckpt.saving.difference_speeds import DifferenceMeasurement, DifferenceSpeeds
from ckpt.tools import inspect

KIB = 1 << 10


@pytest.fixture
def slow_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose file system is known as slow."""
    take_for_slow(tmp_path, monkeypatch, 50e3)
    return tmp_path / "r"


def save(root: Path, *steps: int, **options: Any) -> None:
    """Save drifting states in a thread that is not the main one, since only such threads measure."""

    def run() -> None:
        try:
            for step in steps:
                ckpt.save(drifting_state(step), root, step, **options)
        except BaseException as error:
            errors.append(error)

    errors: list[BaseException] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_few_changes_are_stored_as_differences_without_being_asked_for(slow_repository: Path) -> None:
    save(slow_repository, 1, 2, 3)
    assert weight_row(slow_repository, 1).base is None
    for step in (2, 3):
        assert pack_step(base_of_weights(slow_repository, step).pack) == 1
        assert weight_row(slow_repository, step).stored < weight_row(slow_repository, 1).stored / 5
    assert_drifting_steps_load(slow_repository, 3)
    assert_clean(slow_repository)


def test_a_new_base_is_stored_every_16_saves_and_after_a_restart_too(slow_repository: Path) -> None:
    save(slow_repository, *range(29, 36))
    ranges = {step: weight_row(slow_repository, step).base for step in range(29, 36)}
    assert {step for step, base in ranges.items() if base is None} == {29, 32}
    assert pack_step(base_of_weights(slow_repository, 35).pack) == 32
    assert_drifting_steps_load(slow_repository, 35)


def test_a_step_that_is_kept_for_ever_is_full(slow_repository: Path) -> None:
    save(slow_repository, *range(1, 9), keep=ckpt.Keep(last=2, every=4))
    assert ckpt.open(slow_repository).steps() == [1, 4, 7, 8]
    assert weight_row(slow_repository, 4).base is None
    assert weight_row(slow_repository, 8).base is None
    assert pack_step(base_of_weights(slow_repository, 7).pack) == 4
    assert_drifting_steps_load(slow_repository, 8)


def test_of_irregular_steps_the_one_that_is_kept_for_ever_is_full(slow_repository: Path) -> None:
    """So is the step 19, which is the 20th of a loop that counts from 0."""
    save(slow_repository, 1, 4, 7, 9, 11, 13, 16, 19, 22, 25, keep=ckpt.Keep(last=2, every=10))
    assert ckpt.open(slow_repository).steps() == [1, 9, 19, 22, 25]
    assert [weight_row(slow_repository, step).base for step in (1, 9, 19)] == [None, None, None]
    assert pack_step(base_of_weights(slow_repository, 25).pack) == 22


@pytest.mark.parametrize(
    "options",
    [
        {"full_every": None},
        {"codec": "none"},
        {"codec": {"id": "zstd"}},
        {"key": b"k" * 32},
        {"keep": ckpt.Keep(last=3, copies=2)},
    ],
)
def test_no_difference_is_stored_if_it_is_off_or_could_harm(slow_repository: Path, options: dict[str, Any]) -> None:
    if "key" in options:
        pytest.importorskip("blake3")
    save(slow_repository, 1, 2, 3, **options)
    repo = ckpt.open(slow_repository, **{name: value for name, value in options.items() if name == "key"})
    rows = [row for step in (1, 2, 3) for row in repo[step].manifest().by_block()]
    assert len(rows) >= 9
    assert all(row.base is None for row in rows)


def test_a_fast_store_gets_full_blocks_and_no_base_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = take_for_slow(tmp_path, monkeypatch, 1e9)
    save(tmp_path / "r", 1, 2, 3)
    assert weight_row(tmp_path / "r", 3).base is None
    assert tuner.differences.speed("float32") is None
    assert ckpt.open(tmp_path / "r").commit(3).difference_choices == ()


def test_blocks_that_change_entirely_are_tried_once_in_a_minute(slow_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = take_for_slow(slow_repository.parent, monkeypatch, 50e3)
    noted: list[str] = []
    note = tuner.differences.note
    monkeypatch.setattr(tuner.differences, "note", lambda dtype, measured: (noted.append(dtype), note(dtype, measured)))
    save(slow_repository, *range(1, 7))
    assert noted.count("float64") == 1, "the moments were tried again"
    assert noted.count("float32") == 5
    choices = {choice.dtype: choice for choice in ckpt.open(slow_repository).commit(6).difference_choices}
    assert (choices["float64"].reason, choices["float32"].reason) == (NOT_HALF, FASTER)


def test_ckpt_inspect_says_why(slow_repository: Path) -> None:
    save(slow_repository, 1, 2, 3)
    printed = CliRunner().invoke(inspect.command, [str(slow_repository), "3"], standalone_mode=False).output
    assert "auto: differences for float32: " in printed
    assert "auto: no differences for float64: not faster by half, " in printed
    printed = CliRunner().invoke(inspect.command, [str(slow_repository), "3", "--json"], standalone_mode=False).output
    assert '"stores_differences": true' in printed


def test_records_without_choices_keep_their_bytes(slow_repository: Path) -> None:
    save(slow_repository, 1)
    assert b"difference_choices" not in encode_commit(ckpt.open(slow_repository).commit(1))


def test_differences_can_be_switched_off_and_on_in_one_repository(slow_repository: Path) -> None:
    save(slow_repository, 1, 2)
    save(slow_repository, 3, full_every=None)
    save(slow_repository, 4)
    assert [weight_row(slow_repository, step).base is None for step in (1, 2, 3, 4)] == [True, False, True, False]
    assert pack_step(base_of_weights(slow_repository, 4).pack) == 3
    assert_drifting_steps_load(slow_repository, 4)


# --- measurements ----------------------------------------------------------------------------------------------


def test_one_caller_a_minute_tries_a_difference() -> None:
    now = 0.0
    speeds = DifferenceSpeeds(lambda: now)
    assert [speeds.takes_trial("a"), speeds.takes_trial("a"), speeds.takes_trial("b")] == [True, False, True]
    now = 61.0
    assert [speeds.takes_trial("a"), speeds.takes_trial("a")] == [True, False]
    speeds.renew_trial("a")  # the block had no base
    assert [speeds.takes_trial("a"), speeds.takes_trial("a")] == [True, False]


def test_averages_follow_the_blocks_and_a_base_that_was_read_first_says_nothing_about_reading() -> None:
    now = 0.0
    speeds = DifferenceSpeeds(lambda: now)
    assert speeds.speed("a") is None
    speeds.note("a", DifferenceMeasurement(100 * KIB, 50 * KIB, 1.0, None))
    assert speeds.speed("a").base_bytes_per_second is None
    for _ in range(60):
        speeds.note("a", DifferenceMeasurement(100 * KIB, 10 * KIB, 0.5, 0.1))
    found = speeds.speed("a")
    assert (found.ratio, found.bytes_per_second) == pytest.approx((0.1, 200 * KIB), rel=0.01)
    assert found.base_bytes_per_second == pytest.approx(1000 * KIB)
    now = 3600.0
    speeds.note("a", DifferenceMeasurement(100 * KIB, 90 * KIB, 0.5, None))
    assert speeds.speed("a").ratio == pytest.approx(0.5, rel=0.01), "after a pause, a block counts as much as all before it"
