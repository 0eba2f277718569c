"""The order of steps: by line of training, then by number. Against a model that only remembers what was saved when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.lines import Line, by_number, in_order, line_of
from ckpt.retention import Keep, expired


def test_a_roll_back_makes_the_later_steps_older_than_all_others() -> None:
    line = Line().going_back(1, Line(), 110)
    assert line == Line(1, ((0, 110),))
    order = in_order({100: Line(), 110: Line(), 120: Line(), 130: Line(), 111: line, 112: line})
    assert order.steps == (120, 130, 100, 110, 111, 112)
    assert (order.abandoned, order.aside) == ({120, 130}, frozenset())
    assert order.newest_first() == [112, 111, 110, 100, 130, 120]
    assert order.newest_first(before=111) == [110, 100, 112, 111, 130, 120]


def test_a_second_roll_back_behind_the_first_abandons_both_lines() -> None:
    first = Line().going_back(1, Line(), 110)
    second = first.going_back(2, Line(), 105)
    assert second == Line(2, ((0, 105), (1, -1)))
    order = in_order({105: Line(), 110: Line(), 130: Line(), 111: first, 106: second})
    assert order.steps == (110, 130, 111, 105, 106)
    assert order.abandoned == {110, 130, 111}


def test_a_step_that_was_abandoned_can_be_restored() -> None:
    first = Line().going_back(1, Line(), 110)
    again = first.going_back(2, Line(), 130)
    order = in_order({110: Line(), 130: Line(), 111: first, 131: again})
    assert (order.steps, order.abandoned) == ((111, 110, 130, 131), {111})


def test_a_run_that_knows_nothing_of_another_sets_it_aside() -> None:
    order = in_order({1000: Line(), 0: Line(1), 1: Line(1)})
    assert (order.steps, order.abandoned, order.aside) == ((1000, 0, 1), frozenset(), {1000})
    assert order.live() == (0, 1)


def test_numbers_that_go_down_in_one_run() -> None:
    line = Line(1, ((0, 110),)).going_down(2, 105)
    assert line == Line(2, ((0, 104), (1, 104)))


def test_a_record_that_cannot_be_read_is_not_passed_over() -> None:
    line = Line().going_back(1, Line(), 110)
    order = in_order({110: Line(), 130: Line(), 111: line}, {112})
    assert order.newest_first() == [112, 111, 110, 130]


@given(st.lists(st.tuples(st.none() | st.integers(0, 30), st.integers(1, 5)), max_size=12))
def test_what_was_saved_last_is_the_newest(actions: list[tuple[int | None, int]]) -> None:
    """Each action restores one of the steps that there are, or none, and saves some more steps after it."""
    lines: dict[int, Line] = {}
    history: dict[int, list[tuple[int, int]]] = {}  # of each step: line and number of the saves that led to it, and its own
    at = -1
    line = Line()
    for wish, count in actions:
        if wish is not None and lines:
            order = in_order(lines)
            at = sorted(lines)[wish % len(lines)]
            newest = order.steps[-1]
            line = lines[at] if at == newest else order.newest.going_back(order.newest.number + 1, lines[at], at)
        for _ in range(count):
            past = history.get(at, [])
            at += 1
            lines[at], history[at] = line, [*past, (line.number, at)]
            order = in_order(lines)
            assert order.steps[-1] == at
            still_there = {step for number, step in history[at] if lines[step].number == number}
            assert set(order.live()) == still_there, "what the newest step goes on from"
            assert order.abandoned == set(lines) - still_there
            assert (set(order.steps), order.aside) == (set(lines), frozenset())


def test_retention_deletes_what_was_abandoned_first() -> None:
    line = Line().going_back(1, Line(), 110)
    lines = {100: Line(), 110: Line(), 120: Line(), 130: Line(), 111: line}
    order = in_order(lines).steps
    assert expired(lines, lines, Keep(3), order) == [120, 130]
    assert expired(lines, lines, Keep(4), order) == [120]
    assert expired(lines, lines, Keep(1), order) == [120, 130, 100, 110]
    assert expired(lines, lines, Keep(3, every=60), order) == [130]
    assert expired(lines, {110, 111, 130}, Keep(3), order) == [120]


def test_the_order_of_one_line_is_that_of_the_numbers() -> None:
    assert by_number([3, 1, 2]) == in_order(dict.fromkeys([3, 1, 2], Line()))


@pytest.mark.parametrize("stated", [("1", ()), (-1, ()), (1, ((2, 5),)), (1, ((0, "5"),)), (1, ((0, -2),)), (True, ())])
def test_a_line_that_is_none(stated: tuple[object, object]) -> None:
    with pytest.raises(ValueError, match="line"):
        line_of(*stated)
