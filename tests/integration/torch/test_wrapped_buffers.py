"""Buffers of torch modules that are in the state a second time: in PerRank, as a whole or a part, or by a plain name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.rank_threads import Work, all_well
from helpers.rank_threads import on_ranks as try_on_ranks

import ckpt
from ckpt.saving import buffer_merge
from ckpt.saving.buffer_shares import OWN_BUFFER_BYTES

torch = pytest.importorskip("torch")
from ckpt.adapters.torch import ModelState  # noqa: E402

RANKS = 2
LARGE = OWN_BUFFER_BYTES // 4 // 4 + 4

Make = Callable[[int], dict[str, Any]]


def on_ranks(size: int, work: Work) -> list[Any]:
    return all_well(try_on_ranks(size, work))


def table(value: float, columns: int = 3, rows: int = 4) -> Any:
    """Return a module with a buffer of one value, and with a parameter that is equal on all ranks."""
    made = torch.nn.Linear(2, 2)
    made.register_buffer("table", torch.full((rows, columns), float(value)))
    with torch.no_grad():
        made.weight.fill_(0.5)
        made.bias.fill_(0.5)
    return made


def save(make: Make, url: Path, size: int = RANKS, **options: Any) -> None:
    on_ranks(size, lambda group: ckpt.save(make(group.rank), url, 1, group=group, **options))


def load(make: Make, url: Path, size: int = RANKS) -> list[dict[str, Any]]:
    """Return the state of each rank after a load in place."""

    def loaded(group: Any) -> dict[str, Any]:
        state = make(99)
        result = ckpt.load(url, like=state, group=group)
        assert isinstance(result, dict)
        return state

    return on_ranks(size, loaded)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "buffers differ" in r.getMessage() or "shares memory" in r.getMessage()]


PARTS: dict[str, Callable[[Any], Any]] = {
    "the first rows": lambda x: x[:2],
    "a middle row": lambda x: x[1],
    "a column": lambda x: x[:, 1],
    "every second row": lambda x: x[::2],
    "transposed": lambda x: x.T,
    "one element": lambda x: x[2, 1],
}


@pytest.mark.parametrize("columns", [3, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("module_first", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_a_wrapped_part_comes_back_to_its_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, module_first: bool, columns: int
) -> None:
    """The other elements of a large buffer are rank 0's, those of a small one this rank's if as many ranks load."""

    def state(rank: int) -> dict[str, Any]:
        made = table(rank + 1, columns)
        if columns == LARGE and rank != 99:  # ranks differ in the wrapped elements only
            made.table.fill_(1)
            PARTS[part](made.table).fill_(rank + 1)
        found = {"model": made, "mine": ckpt.PerRank(PARTS[part](made.table))}
        return found if module_first else dict(reversed(found.items()))

    buffer_merge._warned_urls.clear()
    with caplog.at_level(logging.WARNING, "ckpt"):
        save(state, tmp_path)
    assert not warnings_of(caplog)
    for size in (RANKS, 3, 1):
        for rank, made in enumerate(load(state, tmp_path, size)):
            expected = torch.full((4, columns), rank + 1.0 if columns == 3 and size == RANKS else 1.0)
            PARTS[part](expected).fill_(rank % RANKS + 1)
            assert torch.equal(made["model"].table, expected), f"rank {rank} of {size}"
            assert torch.equal(made["mine"].value, PARTS[part](expected))
            assert made["mine"].value.untyped_storage().data_ptr() == made["model"].table.untyped_storage().data_ptr()
    assert not warnings_of(caplog)


@pytest.mark.parametrize("wrap", [lambda m: m, ModelState], ids=["plain", "ModelState"])
@pytest.mark.parametrize("elements", [4, OWN_BUFFER_BYTES // 4], ids=["small", "large"])
@pytest.mark.parametrize("wrapped", ["rows", "first"])
def test_views_of_a_wrapped_array_come_back_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrapped: str, elements: int, wrap: Any
) -> None:
    """`rows` has all elements of the other buffers. A wrapped `first` has some elements of `rows`, and all of `second_name`."""

    def module(rank: int) -> Any:
        made = torch.nn.Module()
        rows = torch.full((2, elements), float(rank + 1))
        for name, buffer in (("rows", rows), ("first", rows[0]), ("last", rows[1]), ("second_name", rows[0])):
            made.register_buffer(name, buffer)
        return made

    def state(rank: int) -> dict[str, Any]:
        made = module(rank)
        return {"model": wrap(made), "mine": ckpt.PerRank(getattr(made, wrapped)), "rows": ckpt.PerRank(made.rows)}

    buffer_merge._warned_urls.clear()
    with caplog.at_level(logging.WARNING, "ckpt"):
        save(state, tmp_path)
        for size in (RANKS, 3):
            found = [made["rows"].value.unique().tolist() for made in load(state, tmp_path, size)]
            assert found == [[rank % RANKS + 1] for rank in range(size)]

        def partly(rank: int) -> dict[str, Any]:
            found = state(rank)
            del found["rows"]
            return found

        save(partly, tmp_path / "partly")
    assert len(warnings_of(caplog)) == (wrapped == "first" and elements > 4)  # then nobody stores `last` of rank 1
    for rank, made in enumerate(load(partly, tmp_path / "partly")):
        assert made["mine"].value.unique().tolist() == [rank + 1]


def test_a_wrapped_part_of_another_place_is_refused(tmp_path: Path) -> None:
    """Both arrays can't have their saved values. Rank 1 alone has another `like`."""
    save(lambda rank: {"model": (made := table(rank)), "mine": ckpt.PerRank(made.table[0])}, tmp_path)

    def load_one(group: Any) -> str:
        made = table(9)
        with pytest.raises((ckpt.LeafMismatch, ckpt.GroupError)) as raised:
            ckpt.load(tmp_path, like={"model": made, "mine": ckpt.PerRank(made.table[group.rank])}, group=group)
        assert made.table.unique().tolist() == [9]
        return str(raised.value)

    messages = on_ranks(RANKS, load_one)
    assert all("`like` has the same memory for two saved arrays" in message for message in messages), messages


@pytest.mark.parametrize("rank_with_part", [0, 1])
def test_one_rank_alone_has_the_wrapped_part(tmp_path: Path, rank_with_part: int) -> None:
    def state(rank: int, value: float) -> dict[str, Any]:
        made = table(value)
        return {"model": made} | ({"mine": ckpt.PerRank(made.table[:2])} if rank == rank_with_part else {})

    on_ranks(RANKS, lambda g: ckpt.save(state(g.rank, g.rank + 1), tmp_path, 1, group=g))

    def values(group: Any) -> Any:
        return ckpt.load(tmp_path, like=state(group.rank, 9), group=group)["model"].table.unique().tolist()

    assert on_ranks(RANKS, values) == [[1], [2]]


def test_a_rank_without_the_buffer_is_refused(tmp_path: Path) -> None:
    def refused(group: Any) -> str:
        made = torch.nn.Linear(2, 2) if group.rank else table(1)
        state = {"model": made} | ({} if group.rank else {"mine": ckpt.PerRank(made.table)})
        with pytest.raises(ckpt.StepRefused) as raised:
            ckpt.save(state, tmp_path, 1, group=group)
        return str(raised.value)

    assert all("model.table is on rank 0 but not on rank 1" in message for message in on_ranks(RANKS, refused))


# --- all bytes are compared ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [lambda x: x, *PARTS.values()], ids=["all", *PARTS])
def test_verify_replicas_skips_what_is_wrapped(tmp_path: Path, part: Any) -> None:
    def state(rank: int) -> dict[str, Any]:
        made = table(1, LARGE)
        part(made.table).fill_(rank)
        return {"model": made, "mine": ckpt.PerRank(part(made.table))}

    save(state, tmp_path, verify_replicas=True)
    assert [made["mine"].value.unique().tolist() for made in load(state, tmp_path)] == [[0], [1]]


def differing_in(at: Any, part: str) -> Make:
    """Return a maker of a large buffer of which ranks also have different values outside of the wrapped part."""

    def state(rank: int) -> dict[str, Any]:
        made = table(1, LARGE)
        PARTS[part](made.table).fill_(rank)
        made.table[at] = rank
        return {"model": made, "mine": ckpt.PerRank(PARTS[part](made.table))}

    return state


@pytest.mark.parametrize("at", [(2, 0), (3, 5000), (3, LARGE - 1)])
def test_verify_replicas_compares_the_rest_of_the_buffer(tmp_path: Path, at: tuple[int, int]) -> None:
    def refused(group: Any) -> None:
        with pytest.raises(ckpt.StepRefused, match=r"leaf model.table differs between rank 0 and rank 1"):
            ckpt.save(differing_in(at, "the first rows")(group.rank), tmp_path, 1, group=group, verify_replicas=True)

    on_ranks(RANKS, refused)


def test_a_warning_names_a_buffer_that_differs_outside_of_the_wrapped_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer_merge._warned_urls.clear()
    with caplog.at_level(logging.WARNING, "ckpt"):
        save(differing_in(3, "the first rows"), tmp_path)
    (message,) = warnings_of(caplog)
    assert "model.table on rank 1" in message


# --- a plain name --------------------------------------------------------------------------------------------------


def named_plainly(made: Any) -> dict[str, Any]:
    return {"table": made.table}


@pytest.mark.parametrize("extra", [named_plainly, lambda m: {"weights": m.state_dict()}], ids=["the buffer", "state_dict"])
@pytest.mark.parametrize("wrap", [lambda m: m, ModelState], ids=["plain", "ModelState"])
@pytest.mark.parametrize("module_first", [True, False])
@pytest.mark.parametrize("verify", [None, True])
def test_a_buffer_that_is_named_before_its_module_comes_back_to_its_rank(
    tmp_path: Path, module_first: bool, wrap: Any, extra: Any, verify: bool | None
) -> None:
    def state(rank: int) -> dict[str, Any]:
        made = table(rank + 1)
        return {"model": wrap(made)} | extra(made) if module_first else extra(made) | {"model": wrap(made)}

    save(state, tmp_path, verify_replicas=verify)
    name = next(name for name in ckpt.open(tmp_path)[1] if name.endswith("@1")).removesuffix("@1")
    for size in (RANKS, 3):
        for rank, made in enumerate(load(state, tmp_path, size)):
            values = (made["table"] if "table" in made else made["weights"]["table"]).unique().tolist()
            assert values == [rank + 1 if size == RANKS else 1]
    assert ckpt.open(tmp_path)[1].verify()
    assert name.endswith("table")


def test_a_large_buffer_that_is_named_before_its_module_is_stored_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def state(rank: int) -> dict[str, Any]:
        made = table(rank + 1, LARGE)
        return named_plainly(made) | {"model": made}

    buffer_merge._warned_urls.clear()
    with caplog.at_level(logging.WARNING, "ckpt"):
        save(state, tmp_path)
    (message,) = warnings_of(caplog)
    assert "table on rank 1" in message
    assert [made["model"].table.unique().tolist() for made in load(state, tmp_path)] == [[1], [1]]


def test_a_parameter_that_is_also_a_buffer_must_be_equal_on_all_ranks(tmp_path: Path) -> None:
    """Training keeps parameters equal, so a difference is an error that the buffer must not hide."""

    def refused(group: Any) -> None:
        made = torch.nn.Linear(2, 2)
        with torch.no_grad():
            made.weight.fill_(group.rank)
            made.bias.fill_(0)
        made.register_buffer("copy", made.weight.data)
        with pytest.raises(ckpt.StepRefused, match="leaf model.weight has other bytes on rank 1"):
            ckpt.save({"model": made}, tmp_path, 1, group=group)

    on_ranks(RANKS, refused)
