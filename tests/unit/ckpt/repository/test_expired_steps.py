"""The rule by which steps expire, and the arguments that set it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.messages import one_line
from hypothesis import given
from hypothesis import strategies as st

from ckpt import Keep
from ckpt.repository.retention import as_keep, expired_steps
from ckpt.storage.base.errors import InvalidArgument

STEPS = st.sets(st.integers(0, 60), max_size=20)
KEEPS = st.builds(Keep, st.integers(1, 5), st.none() | st.integers(1, 12))


def is_permanent(step: int, steps: set[int], good: set[int], every: int) -> bool:
    """Return whether no good step of the window is before a step, and it is not one below a good multiple."""
    multiple, first = step + 1, step - step % every
    if step % every == 0 or (multiple % every == 0 and multiple not in good):
        return True
    return not good & {*range(first, step), *({first - 1} if first not in steps else ())}


@given(STEPS, st.data(), KEEPS)
def test_retention_deletes_exactly_the_steps_that_it_may(steps: set[int], data: st.DataObject, keep: Keep) -> None:
    good = data.draw(st.sets(st.sampled_from(sorted(steps)))) if steps else set()
    expired = set(expired_steps(list(steps), list(good), keep))
    newest = set(sorted(good)[-keep.last :])
    assert expired <= steps
    assert not expired & newest, "one of the newest good steps is deleted"
    permanent = {step for step in steps if keep.every and is_permanent(step, steps, good, keep.every)}
    assert not expired & permanent, "a step is deleted that is kept permanently"
    assert not good or max(good) not in expired, "the last good step is deleted"
    assert len(good) >= keep.last or not expired, "a step is deleted though too few are known to be good"
    assert not any(s > min(newest) for s in expired), "a newer step is deleted than one that is kept"
    # Every step that may be deleted is deleted.
    for step in steps - expired:
        assert len(good) < keep.last or step >= min(newest) or step in permanent


@given(STEPS, KEEPS)
def test_a_second_round_of_retention_deletes_nothing(steps: set[int], keep: Keep) -> None:
    left = steps - set(expired_steps(steps, steps, keep))
    assert expired_steps(left, left, keep) == []
    assert len(left) >= min(keep.last, len(steps))


@given(STEPS, KEEPS)
def test_damage_deletes_no_additional_step(steps: set[int], keep: Keep) -> None:
    """With fewer good steps, older steps are kept."""
    all_good = set(expired_steps(steps, steps, keep))
    for bad in steps:
        assert set(expired_steps(steps, steps - {bad}, keep)) <= all_good


def test_keep_is_a_number_or_a_rule() -> None:
    assert as_keep(None) is None
    assert as_keep(3) == Keep(3)
    assert as_keep(Keep(2, every=10)) == Keep(2, 10)
    assert expired_steps(range(0, 50, 5), range(0, 50, 5), Keep(2, every=20)) == [5, 10, 15, 25, 30, 35]


def test_steps_counted_from_zero_are_kept_where_no_multiple_exists() -> None:
    counted = range(9, 60, 10)
    assert expired_steps(counted, counted, Keep(2, every=20)) == [29]
    both = range(18, 61)
    kept = set(both) - set(expired_steps(both, both, Keep(2, every=20)))
    assert kept == {18, 20, 40, 59, 60}, "of 19 and 20, one is enough, and 18 is the first that was saved"


def test_of_steps_without_a_multiple_the_first_of_each_window_is_kept() -> None:
    irregular = [37, 61, 88, 121, 143, 312, 350, 388, 402, 455]
    assert set(irregular) - set(expired_steps(irregular, irregular, Keep(1, every=100))) == {37, 121, 312, 402, 455}


def test_expired_steps_are_returned_from_the_oldest() -> None:
    assert expired_steps([4, 1, 3, 2, 5], [5, 2, 4], Keep(2)) == [1, 2, 3]
    assert expired_steps([1, 2, 3], [1, 2, 3], Keep(3)) == []


def test_after_a_roll_back_the_abandoned_steps_expire_first() -> None:
    """Steps 20 and 30 were abandoned, then 12 and 14 were saved."""
    order = [20, 30, 10, 12, 14]
    assert expired_steps(order, order, Keep(1), order) == [20, 30, 10, 12]
    assert expired_steps([14, 30, 10, 12, 20], [10, 12, 14, 20], Keep(3), order) == [20, 30]
    assert expired_steps(order, order, Keep(2, every=10), order) == []
    assert expired_steps(order, [20, 30], Keep(2), order) == []


@pytest.mark.parametrize("last", [0, -1, True, 2.5, "3", None])
def test_at_least_one_step_must_be_kept(last: object) -> None:
    with pytest.raises(InvalidArgument) as error:
        Keep(last)  # type: ignore[arg-type]
    one_line(error, f"Keep(last={last!r}, every=None, copies=1): at least the last step must be kept, and `every` must be a ")


@pytest.mark.parametrize("every", [0, -5, 1.5, "x"])
def test_every_must_be_a_positive_number(every: object) -> None:
    with pytest.raises(InvalidArgument) as error:
        Keep(3, every)  # type: ignore[arg-type]
    one_line(error, f"every={every!r}", "`every` must be a positive number of steps")
    Keep(1, 1)


@pytest.mark.parametrize("copies", [0, -1, 4, 1.5, None])
def test_each_copy_needs_a_step_that_is_kept(copies: object) -> None:
    with pytest.raises(InvalidArgument) as error:
        Keep(3, copies=copies)  # type: ignore[arg-type]
    one_line(error, f"copies={copies!r}): `copies` must be from 1 to `last`: each copy belongs to a step that is kept")
    assert [Keep(3, copies=count).copies for count in (1, 3)] == [1, 3]


def test_the_argument_keep_must_be_a_number_or_a_rule() -> None:
    assert as_keep(np.int64(4)) == Keep(4)
    for keep in ("all", 1.5, [3]):
        with pytest.raises(InvalidArgument) as error:
            as_keep(keep)  # type: ignore[arg-type]
        one_line(error, f"keep={keep!r}: use a number of steps, or ckpt.Keep")
    with pytest.raises(InvalidArgument):
        as_keep(0)
