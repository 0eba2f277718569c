"""The rules of a register as pure functions, each at its borders; the order of fence numbers; the pages of a listing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.storage.base.errors import Changed, StoreError
from ckpt.storage.registers import fence_numbers
from ckpt.storage.registers.base import (
    BODY_BYTES,
    NO_BALLOT,
    Ballot,
    DamagedRegister,
    DirectChange,
    Register,
    RegisterAnswer,
    RegisterValue,
    can_accept,
    can_change_directly,
    can_collect,
    can_propose_directly,
    decode_ballot,
    encode_ballot,
    final_record,
    floor_ballot,
    is_final,
    record_checksum,
    require_record_fits,
    require_same_value,
    with_floor_promise,
    with_promise,
)  # fmt: skip
from ckpt.storage.registers.sqlite import SqliteRegisters

ERA = 1 << 32
LATER = 3 * ERA + 2
"""The fence number of ring 3 in era 2."""
LOW, MIDDLE, HIGH = Ballot(1, "a"), Ballot(2, "a"), Ballot(3, "a")
VALUE = RegisterValue(b"head", b"body")
DAMAGED = DamagedRegister("its checksum is wrong")
FINAL = final_record(VALUE)


def test_a_direct_change_has_the_next_ballot_of_its_value() -> None:
    assert Ballot(1, "a", 4, "w").next_step("x") == Ballot(1, "a", 5, "x")
    assert LOW < LOW.next_step("x") < Ballot(1, "b")
    assert floor_ballot(7) == NO_BALLOT
    assert NO_BALLOT < floor_ballot(LATER) == Ballot(LATER, "")


@pytest.mark.parametrize(
    ("record", "promise"),
    [
        (Register(), MIDDLE), (Register(LOW, LOW, VALUE), MIDDLE), (Register(MIDDLE, LOW, VALUE), None), (Register(HIGH), None),
        (DAMAGED, None), (FINAL, None), (Register(LOW, FINAL.accepted_ballot, VALUE), None),
    ],
)  # fmt: skip
def test_a_promise_is_given_only_above_the_last_one(record: RegisterAnswer, promise: Ballot | None) -> None:
    found = with_promise(record, MIDDLE)
    assert (found.promised_ballot if found else None) == promise
    if found:
        assert isinstance(record, Register)
        assert (found.accepted_ballot, found.value) == (record.accepted_ballot, record.value)


@pytest.mark.parametrize(
    ("record", "plain", "repairing"),
    [
        (Register(), True, True), (Register(MIDDLE, LOW, VALUE), True, True), (Register(HIGH, LOW, VALUE), False, False),
        (DAMAGED, False, True), (FINAL, False, False), (Register(LOW, FINAL.accepted_ballot, VALUE), False, False),
    ],
)  # fmt: skip
def test_a_value_is_accepted_at_or_above_the_promise(record: RegisterAnswer, plain: bool, repairing: bool) -> None:
    assert can_accept(record, MIDDLE, repair_damaged=False) is plain
    assert can_accept(record, MIDDLE, repair_damaged=True) is repairing


@pytest.mark.parametrize(
    ("record", "is_allowed"),
    [
        (Register(MIDDLE, MIDDLE, VALUE), True), (Register(LOW, MIDDLE, VALUE), True), (Register(HIGH, MIDDLE, VALUE), False),
        (Register(LOW, LOW, VALUE), False), (Register(HIGH, HIGH, VALUE), False), (Register(), False), (DAMAGED, False),
    ],
)  # fmt: skip
def test_a_direct_change_needs_the_expected_value_without_a_higher_promise(record: RegisterAnswer, is_allowed: bool) -> None:
    assert can_change_directly(record, DirectChange("n", MIDDLE, VALUE)) is is_allowed


def test_a_final_record_never_changes() -> None:
    assert is_final(FINAL)
    assert not is_final(Register(FINAL.promised_ballot, LOW, VALUE)), "a promise alone is not final"
    assert not is_final(DAMAGED)
    assert not can_change_directly(FINAL, DirectChange("n", FINAL.accepted_ballot, VALUE))
    require_same_value(FINAL, "n", VALUE)
    for other in (final_record(RegisterValue(b"x")), DAMAGED, Register()):
        with pytest.raises(Changed, match="^n was agreed on before with another value"):
            require_same_value(other, "n", VALUE)


def test_a_first_value_needs_two_phases_in_a_later_ring() -> None:
    assert [can_propose_directly(Register(), number) for number in (0, 1, 2, LATER)] == [True, True, False, False]
    assert can_propose_directly(Register(LOW, LOW, VALUE), LATER)


@pytest.mark.parametrize(
    ("record", "is_allowed"),
    [
        (Register(LOW, LOW, VALUE), True), (Register(floor_ballot(LATER), LOW, VALUE), True),
        (Register(Ballot(LATER, "a"), LOW, VALUE), False),  # a proposer relies on this promise
        (Register(LOW, MIDDLE, VALUE), False), (DAMAGED, False), (Register(), False),
    ],
)  # fmt: skip
def test_a_register_is_collected_only_with_the_ballot_that_was_found(record: RegisterAnswer, is_allowed: bool) -> None:
    assert can_collect(record, LOW, LATER) is is_allowed


def test_a_final_register_is_not_collected() -> None:
    assert not can_collect(FINAL, FINAL.accepted_ballot, LATER)
    assert not can_collect(Register(LOW, FINAL.accepted_ballot, VALUE), FINAL.accepted_ballot, LATER)
    assert can_collect(Register(), NO_BALLOT, 1)


def test_a_register_without_a_value_has_promised_the_floor() -> None:
    floor = floor_ballot(LATER)
    assert with_floor_promise(Register(LOW), LATER) == Register(floor)
    assert with_floor_promise(Register(floor), LATER) == Register(floor)
    assert with_floor_promise(Register(Ballot(LATER, "a")), LATER) == Register(Ballot(LATER, "a"))
    assert with_floor_promise(Register(LOW, LOW, VALUE), LATER) == Register(LOW, LOW, VALUE)
    assert with_floor_promise(Register(LOW), 3) == Register(LOW)


def test_a_long_value_is_refused() -> None:
    require_record_fits("n", None)
    require_record_fits("n", RegisterValue(b"h", bytes(BODY_BYTES - 1)))
    with pytest.raises(StoreError, match=f"the record of n has {BODY_BYTES + 1} bytes; a register takes at most {BODY_BYTES}"):
        require_record_fits("n", RegisterValue(b"h", bytes(BODY_BYTES)))


def test_the_checksum_covers_each_part_and_where_it_ends() -> None:
    parts = [
        ("n", b"p", b"a", VALUE), ("m", b"p", b"a", VALUE), ("n", b"q", b"a", VALUE), ("n", b"p", b"b", VALUE),
        ("n", b"p", b"a", RegisterValue(b"head!", b"body")), ("n", b"p", b"a", RegisterValue(b"head", b"body!")),
        ("n", b"p", b"a", RegisterValue(b"headb", b"ody")), ("n", b"p", b"a", None), ("n", b"p", b"a", RegisterValue(b"")),
        ("np", b"", b"a", VALUE),
    ]  # fmt: skip
    sums = {record_checksum(*part) for part in parts}
    assert len(sums) == len(parts)
    assert all(-(1 << 63) <= one < 1 << 63 for one in sums)


BALLOTS = st.builds(
    Ballot, st.integers(0, 1 << 61), st.text("abz", max_size=2), st.integers(0, 10**9), st.text("abz", max_size=2)
)


@given(BALLOTS, BALLOTS)
def test_the_bytes_of_ballots_have_their_order(one: Ballot, other: Ballot) -> None:
    assert decode_ballot(encode_ballot(one)) == one
    assert (encode_ballot(one) < encode_ballot(other)) is (one < other)


# --- fence numbers ---------------------------------------------------------------------------------------------


def test_the_ring_and_the_era_of_a_fence_number() -> None:
    assert [fence_numbers.has_era(n) for n in (0, 3, ERA - 1, ERA, LATER)] == [False, False, False, True, True]
    assert [fence_numbers.ring_epoch(n) for n in (0, 3, ERA - 1, 3 * ERA, LATER)] == [0, 3, ERA - 1, 3, 3]
    assert sorted([4, 2, LATER, 0, 3, 1], key=fence_numbers.order_key) == [0, 1, 2, 3, LATER, 4]


@pytest.mark.parametrize(
    ("current", "number", "expected"),
    [
        (1, 2, 2), (2, 1, 2), (3, LATER, LATER), (LATER, 3, LATER), (LATER, 4, 4 * ERA), (4, LATER, 4 * ERA),
        (LATER, LATER + 1, LATER + 1), (0, 0, 0),
    ],
)  # fmt: skip
def test_a_fence_only_rises_and_keeps_its_era(current: int, number: int, expected: int) -> None:
    assert fence_numbers.advance_fence(current, number) == expected


def test_the_next_era_is_of_the_same_ring() -> None:
    assert fence_numbers.next_era(3) == 3 * ERA + 1
    assert fence_numbers.next_era(LATER) == LATER + 1
    assert fence_numbers.next_era(LATER, above=LATER + 5) == LATER + 6
    assert fence_numbers.next_era(4 * ERA - 1) is None, "the eras of ring 3 are used up"
    assert fence_numbers.next_era(3, above=4 * ERA) is None


def test_a_client_uses_no_number_of_another_ring() -> None:
    assert fence_numbers.number_for_ring(3, 5) == 3
    assert fence_numbers.number_for_ring(3, LATER) == LATER
    assert fence_numbers.number_for_ring(4, LATER) == 4 * ERA
    assert fence_numbers.number_for_ring(2, LATER) == 2 * ERA


def test_a_refusal_names_both_rings() -> None:
    assert fence_numbers.outdated_message(LATER, 2) == (
        "the members that keep records have changed: they have ring 3 in era 2, and the call has ring 2"
    )


# --- listings --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 9_999, 10_000, 10_001, 20_001])
def test_a_long_listing_has_each_register_once(tmp_path: Path, count: int) -> None:
    registers = SqliteRegisters(str(tmp_path / "records"))
    try:
        registers.mark_complete()
        registers.fence(2)
        names = [f"f{i:06}" for i in range(count)]
        if names:
            assert all(registers.accept([(name, VALUE) for name in [*names, "g"]], LOW, fence_number=2))
        assert [name for name, _ in registers.scan_all("f", 2)] == names
        with pytest.raises(StoreError, match="they have ring 2, and the call has ring 1"):
            list(registers.scan_all("f", 1))
    finally:
        registers.close()
