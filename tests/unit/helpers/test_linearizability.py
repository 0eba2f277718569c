"""The checker of histories: it accepts what one register can do, and nothing else."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from helpers.linearizability import Call, is_linearizable, shortest_wrong_prefix, state_after

LATE = math.inf


def put(value: str, began: float, ended: float) -> Call:
    return Call("a", "put", began, ended, value)


def get(result: str | None, began: float, ended: float) -> Call:
    return Call("b", "get", began, ended, None, result)


def delete(began: float, ended: float) -> Call:
    return Call("c", "delete", began, ended)


def put_new(value: str, result: str | None, began: float, ended: float) -> Call:
    return Call("d", "put_new", began, ended, value, result)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([], True),
        ([get(None, 0, 1)], True),
        ([get("x", 0, 1)], False),
        ([put("x", 0, 1), get("x", 2, 3)], True),
        ([put("x", 0, 1), get(None, 2, 3)], False),  # an acknowledged write is lost
        ([put("x", 0, 4), get(None, 1, 2)], True),  # the write takes place after the read
        ([put("x", 0, 4), get("x", 1, 2), get(None, 3, 4)], False),  # a value that was read disappears
        ([put("x", 0, LATE), get(None, 1, 2), get("x", 5, 6)], True),  # an unknown write takes place late
        ([put("x", 0, LATE), get(None, 1, 2)], True),  # or never
        ([put("x", 0, LATE), get("x", 1, 2), get(None, 3, 4)], False),  # but not for a while
        ([put("x", 0, 1), put("y", 2, 3), get("x", 4, 5)], False),  # a stale read
        ([put("x", 0, 3), put("y", 0, 3), get("x", 4, 5), get("x", 6, 7)], True),
        ([put("x", 0, 3), put("y", 0, 3), get("x", 4, 5), get("y", 6, 7)], False),
        ([put("x", 0, 1), delete(2, 3), get("x", 4, 5)], False),
        ([put("x", 0, 1), delete(2, LATE), get("x", 4, 5), get(None, 6, 7)], True),
        ([put_new("x", None, 0, 3), put_new("y", None, 1, 2)], False),  # both win
        ([put_new("x", None, 0, 3), put_new("y", "exists", 1, 2), get("x", 4, 5)], True),
        ([put_new("x", "exists", 0, 1)], False),
        ([put_new("x", None, 0, LATE), put_new("y", "exists", 1, 2), get("x", 4, 5)], True),
    ],
)
def test_each_small_history_is_decided_right(calls: list[Call], expected: bool) -> None:
    assert is_linearizable(calls) is expected


def by_every_order(calls: list[Call]) -> bool:
    """Decide by trying all orders: slow and obvious."""
    unknown = [call for call in calls if call.is_unknown]
    known = [call for call in calls if not call.is_unknown]
    for count in range(len(unknown) + 1):
        for happened in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *happened]):
                if any(later.ended < earlier.began for earlier, later in itertools.combinations(order, 2)):
                    continue
                state, possible = None, True
                for call in order:
                    possible, state = state_after(call, state)
                    if not possible:
                        break
                if possible:
                    return True
    return False


def random_history(draw: random.Random, count: int) -> list[Call]:
    """Return calls with random times and results: about half of the histories are linearizable."""
    calls = []
    for _ in range(count):
        began = draw.randint(0, 8)
        ended = LATE if draw.random() < 0.15 else began + draw.randint(0, 4)
        kind = draw.choice(["put", "put", "get", "get", "delete", "put_new"])
        value, read = draw.choice("xy"), draw.choice(["x", "y", None])
        calls.append({
            "put": put(value, began, ended), "get": get(read, began, ended), "delete": delete(began, ended),
            "put_new": put_new(value, draw.choice([None, "exists"]), began, ended),
        }[kind])  # fmt: skip
    return calls


def test_it_agrees_with_all_orders(rng: random.Random) -> None:
    found = {True: 0, False: 0}
    for _ in range(400):
        calls = random_history(rng, rng.randint(1, 6))
        expected = by_every_order(calls)
        found[expected] += 1
        assert is_linearizable(calls) is expected, calls
    assert min(found.values()) > 20


@pytest.mark.slow
def test_a_long_history_of_one_register_is_accepted_and_each_changed_read_is_refused(rng: random.Random) -> None:
    """Simulate a register: each call takes place at a random moment between its begin and its end."""
    calls: list[Call] = []
    state: str | None = None
    moment = 0.0
    for number in range(1000):
        moment += rng.random()
        began, ended = moment - 3 * rng.random(), moment + 3 * rng.random()
        kind = rng.choice(["put", "get", "get", "delete", "put_new"])
        if kind == "get":
            calls.append(get(state, began, ended))
        elif kind == "delete":
            calls.append(delete(began, ended))
            state = None
        elif kind == "put":
            state = f"{number}"
            calls.append(put(state, began, ended))
        else:
            calls.append(put_new(f"{number}", None if state is None else "exists", began, ended))
            state = f"{number}" if state is None else state
    assert is_linearizable(calls)
    reads = [i for i, call in enumerate(calls) if call.kind == "get"]
    changed = rng.choice(reads)
    wrong = [replace(call, result="never written") if i == changed else call for i, call in enumerate(calls)]
    assert not is_linearizable(wrong)
    assert shortest_wrong_prefix(wrong)[-1].began <= calls[changed].ended
