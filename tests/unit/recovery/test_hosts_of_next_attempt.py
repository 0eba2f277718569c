"""Which hosts take part in the next attempt, how long it waits for others, and the text that says what has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.agent_worlds import failure
from hypothesis import given
from hypothesis import strategies as st

from ckpt.recovery.policy.hosts_of_next_attempt import HostChoice, choose_hosts, suspected_hosts, worth_waiting_seconds


@pytest.mark.parametrize(
    ("ready", "suspected", "has_waited", "expected"),
    [
        ("abc", "", False, HostChoice(("a", "b", "c"), "")),
        ("cba", "", False, HostChoice(("a", "b", "c"), "")),  # hosts keep their positions
        ("abcd", "", False, HostChoice(("a", "b", "c"), "")),
        ("acd", "", False, HostChoice(("a", "d", "c"), "without b (gone) with d instead")),
        ("abcd", "b", False, HostChoice(("a", "d", "c"), "without b (suspected) with d instead")),
        ("acd", "b", False, HostChoice(("a", "d", "c"), "without b (gone) with d instead")),
        ("ade", "", False, HostChoice(("a", "d", "e"), "without b (gone), c (gone) with d, e instead")),
        ("abc", "b", False, HostChoice(("a", "b", "c"), "")),  # there is no other host
        ("ab", "", False, None),
        ("ab", "", True, HostChoice(("a", "b"), "without c (gone)")),
        ("abc", "c", True, HostChoice(("a", "b"), "without c (suspected)")),
        ("abc", "bc", True, HostChoice(("a", "b", "c"), "")),  # one good host is not enough
        ("abcd", "bc", False, HostChoice(("a", "b", "d"), "without c (suspected) with d instead")),  # two are not enough
        ("abcd", "abc", False, HostChoice(("a", "b", "d"), "without c (suspected) with d instead")),
        ("cbad", "abc", False, HostChoice(("d", "b", "c"), "without a (suspected) with d instead")),
        ("a", "", True, None),
        ("", "", True, None),
    ],
)
def test_the_hosts_of_the_next_attempt(ready: str, suspected: str, has_waited: bool, expected: HostChoice | None) -> None:
    """The job needs three hosts. After the wait two are enough. The attempt before had a, b and c."""
    assert choose_hosts("abc", ready, set(suspected), 3, 2, has_waited) == expected


def test_the_first_attempt_takes_the_hosts_in_the_order_of_their_arrival() -> None:
    assert choose_hosts("", "cab", set(), 2, 1, False) == HostChoice(("c", "a"), "")
    assert choose_hosts("", "c", set(), 2, 1, False) is None


def test_a_smaller_job_grows_again() -> None:
    assert choose_hosts("ab", "abcd", set(), 4, 2, False) == HostChoice(("a", "b", "c", "d"), "with c, d")
    assert choose_hosts("abc", "abc", set(), 2, 2, False) == HostChoice(("a", "b"), "without c (not needed)")


def test_a_straggler_is_suspected_and_others_only_after_two_failures() -> None:
    assert suspected_hosts([failure("a", cause="straggler")]) == {"a"}
    late = [failure("a", 4, step=200), failure("a", 4, step=200)]
    assert suspected_hosts(late) == {"a"}, "no newer step between them"
    assert suspected_hosts([failure("a", 4, cause="asked"), failure("a", 5, restored=4)]) == set()
    assert suspected_hosts([failure("a", 4), failure("a", 5, cause="preempted", restored=4)]) == set()
    assert suspected_hosts([failure("a", 4), failure("b", 4), failure("b", 4)]) == {"b"}
    assert suspected_hosts([]) == set()


@pytest.mark.parametrize("cause", ["asked", "preempted"])
def test_a_requested_end_before_one_failure_makes_no_host_suspect(cause: str) -> None:
    assert suspected_hosts([failure("a", 4, cause=cause), failure("a", 4, step=200, restored=4)]) == set()


def test_two_failures_on_one_host_without_progress_make_it_suspect() -> None:
    assert suspected_hosts([failure("a"), failure("a")]) == {"a"}
    assert suspected_hosts([failure("a"), failure("b"), failure("a")]) == set()
    assert suspected_hosts([failure("a", 4), failure("a", 9)]) == set(), "the job made progress in between"
    assert suspected_hosts([failure("a"), failure("a", cause="asked")]) == set()


@pytest.mark.parametrize(("first", "second", "expected"), [(3, 3, {"a"}), (32, 32, {"a"}), (33, 3, set()), (3, 33, set())])
def test_a_host_that_fails_soon_is_suspected_where_each_step_is_saved(first: int, second: int, expected: set[str]) -> None:
    """Each attempt has saved a newer step, so progress alone would hide the host."""
    one = failure("a", first, step=first, restored=0)
    other = failure("a", first + second, step=first + second, restored=first)
    assert suspected_hosts([one, other]) == expected
    assert suspected_hosts([one, replace(other, host="b")]) == set()
    assert suspected_hosts([replace(one, cause="asked"), other]) == set()


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.sets(st.sampled_from("abcdef")), st.integers(1, 4), st.booleans())
def test_hosts_are_chosen_from_the_good_ones_and_keep_their_ranks(
    ready: list[str], suspected: set[str], count: int, waited: bool
) -> None:
    least = max(1, count - 1)
    before = list("abcd"[:count])
    choice = choose_hosts(before, ready, suspected, count, least, waited)
    if choice is None:
        assert len(ready) < (least if waited else count)
        return
    assert least <= len(choice.hosts) <= count
    assert len(set(choice.hosts)) == len(choice.hosts)
    assert set(choice.hosts) <= set(ready)
    good = [name for name in ready if name not in suspected]
    assert len(set(good) & set(choice.hosts)) == min(len(good), count), "no good host is left out for a suspected one"
    if len(good) >= count:
        assert not set(choice.hosts) & suspected
        for i, name in enumerate(before):
            if name in good:
                assert choice.hosts[i] == name, "a host that stays keeps its ranks"


@pytest.mark.parametrize(
    ("steps", "step_seconds", "expected"),
    [(0, 100.0, 0.0), (-1, 100.0, 0.0), (1, 0.1, 10.0), (1, 20.0, 20.0), (3, 20.0, 60.0), (9, 20.0, 90.0), (1, 0.0, 10.0)],
)
def test_the_wait_for_a_silent_host(steps: int, step_seconds: float, expected: float) -> None:
    assert worth_waiting_seconds(steps, step_seconds, 90.0) == expected


def test_the_wait_is_never_longer_than_the_longest() -> None:
    assert worth_waiting_seconds(5, 1.0, 3.0) == 3.0
