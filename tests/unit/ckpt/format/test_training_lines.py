"""The order of steps is by training line, then by number; compared with a model that records when each step was saved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.training_lines import TrainingLine, order_by_number, order_steps, parse_line
from ckpt.repository.retention import Keep, expired_steps


def test_a_roll_back_makes_the_later_steps_older_than_all_others() -> None:
    line = TrainingLine().after_rollback(1, TrainingLine(), 110)
    assert line == TrainingLine(1, ((0, 110),))
    order = order_steps(
        {100: TrainingLine(), 110: TrainingLine(), 120: TrainingLine(), 130: TrainingLine(), 111: line, 112: line}
    )
    assert order.steps == (120, 130, 100, 110, 111, 112)
    assert (order.abandoned, order.set_aside) == ({120, 130}, frozenset())
    assert order.newest_first() == [112, 111, 110, 100, 130, 120]
    assert order.newest_first(restore_step_limit=111) == [110, 100, 112, 111, 130, 120]


def test_a_second_roll_back_behind_the_first_abandons_both_lines() -> None:
    first = TrainingLine().after_rollback(1, TrainingLine(), 110)
    second = first.after_rollback(2, TrainingLine(), 105)
    assert second == TrainingLine(2, ((0, 105), (1, -1)))
    order = order_steps({105: TrainingLine(), 110: TrainingLine(), 130: TrainingLine(), 111: first, 106: second})
    assert order.steps == (110, 130, 111, 105, 106)
    assert order.abandoned == {110, 130, 111}


def test_a_step_that_was_abandoned_can_be_restored() -> None:
    first = TrainingLine().after_rollback(1, TrainingLine(), 110)
    again = first.after_rollback(2, TrainingLine(), 130)
    order = order_steps({110: TrainingLine(), 130: TrainingLine(), 111: first, 131: again})
    assert (order.steps, order.abandoned) == ((111, 110, 130, 131), {111})


def test_steps_of_an_unrelated_run_are_set_aside() -> None:
    order = order_steps({1000: TrainingLine(), 0: TrainingLine(1), 1: TrainingLine(1)})
    assert (order.steps, order.abandoned, order.set_aside) == ((1000, 0, 1), frozenset(), {1000})
    assert order.history() == (0, 1)


def test_a_lower_step_number_in_one_run_opens_a_new_line() -> None:
    line = TrainingLine(1, ((0, 110),)).after_lower_step(2, 105)
    assert line == TrainingLine(2, ((0, 104), (1, 104)))


def test_a_step_with_an_unreadable_record_is_not_passed_over() -> None:
    line = TrainingLine().after_rollback(1, TrainingLine(), 110)
    order = order_steps({110: TrainingLine(), 130: TrainingLine(), 111: line}, {112})
    assert order.newest_first() == [112, 111, 110, 130]


def test_the_only_step_of_the_newest_line_is_tried_first_although_its_record_is_unreadable() -> None:
    line = TrainingLine().after_rollback(1, TrainingLine(), 110)
    order = order_steps({110: TrainingLine(), 130: TrainingLine()}, {111}, line)
    assert order.newest_first() == [111, 110, 130]
    assert (order.newest_line, order.abandoned) == (line, {130})


def test_a_line_without_steps_changes_no_order() -> None:
    line = TrainingLine().after_rollback(1, TrainingLine(), 110)
    lines = {110: TrainingLine(), 130: TrainingLine()}
    assert order_steps(lines, (), line) == order_steps(lines)


@given(st.lists(st.tuples(st.none() | st.integers(0, 30), st.integers(1, 5)), max_size=12))
def test_the_step_that_was_saved_last_is_the_newest(actions: list[tuple[int | None, int]]) -> None:
    """Each action restores one of the existing steps, or none, and saves some more steps after it."""
    lines: dict[int, TrainingLine] = {}
    history: dict[int, list[tuple[int, int]]] = {}  # of each step, the line and number of the saves that led to it, and its own
    at = -1
    line = TrainingLine()
    for restored_index, count in actions:
        if restored_index is not None and lines:
            order = order_steps(lines)
            at = sorted(lines)[restored_index % len(lines)]
            newest = order.steps[-1]
            line = lines[at] if at == newest else order.newest_line.after_rollback(order.newest_line.number + 1, lines[at], at)
        for _ in range(count):
            past = history.get(at, [])
            at += 1
            lines[at], history[at] = line, [*past, (line.number, at)]
            order = order_steps(lines)
            assert order.steps[-1] == at
            remaining = {step for number, step in history[at] if lines[step].number == number}
            assert set(order.history()) == remaining, "the steps from which the newest one continues"
            assert order.abandoned == set(lines) - remaining
            assert (set(order.steps), order.set_aside) == (set(lines), frozenset())


def test_retention_deletes_abandoned_steps_first() -> None:
    line = TrainingLine().after_rollback(1, TrainingLine(), 110)
    lines = {100: TrainingLine(), 110: TrainingLine(), 120: TrainingLine(), 130: TrainingLine(), 111: line}
    order = order_steps(lines).steps
    assert expired_steps(lines, lines, Keep(3), order) == [120, 130]
    assert expired_steps(lines, lines, Keep(4), order) == [120]
    assert expired_steps(lines, lines, Keep(1), order) == [120, 130, 100, 110]
    assert expired_steps(lines, lines, Keep(3, every=60), order) == [130]
    assert expired_steps(lines, {110, 111, 130}, Keep(3), order) == [120]


def test_steps_of_one_line_are_ordered_by_number() -> None:
    assert order_by_number([3, 1, 2]) == order_steps(dict.fromkeys([3, 1, 2], TrainingLine()))


@pytest.mark.parametrize("stated", [("1", ()), (-1, ()), (1, ((2, 5),)), (1, ((0, "5"),)), (1, ((0, -2),)), (True, ())])
def test_a_malformed_line_is_refused(stated: tuple[object, object]) -> None:
    with pytest.raises(ValueError, match="line"):
        parse_line(*stated)
