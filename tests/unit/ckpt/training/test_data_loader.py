"""data.Loader: after any sequence of restarts, on any number of ranks, each sample occurs once and in the same order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.sample_data import Numbers, RandomlyTransformed, loader, torch, uninterrupted
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import data
from ckpt.storage.base.errors import InvalidArgument
from ckpt.training import batch_order
from ckpt.training.batch_order import Cursor, EpochPlan, epoch_order, format_ranges, merge_ranges, parse_ranges, rank_share


@given(st.integers(0, 1000), st.integers(1, 50))
def test_shares_of_ranks_partition_a_batch(count: int, world_size: int) -> None:
    shares = [rank_share(count, rank, world_size) for rank in range(world_size)]
    assert [i for part in shares for i in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 1000))
def test_the_order_of_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(size, seed, epoch)) == list(range(size))
    assert epoch_order(size, seed, epoch).tolist() == epoch_order(size, seed, epoch).tolist()


def test_orders_of_epochs_do_not_change_with_versions() -> None:
    """A run that continues with a newer numpy must continue in the same order."""
    assert epoch_order(10, 3, 1).tolist() == ORDER_OF_10
    assert epoch_order(1000, 0, 0).tolist() != epoch_order(1000, 0, 1).tolist() != epoch_order(1000, 1, 0).tolist()
    assert epoch_order(3, 0, 0, shuffle=False).tolist() == [0, 1, 2]


ORDER_OF_10 = [3, 0, 4, 8, 2, 7, 9, 6, 1, 5]


def test_seeds_of_samples_differ() -> None:
    seeds = {batch_order.sample_seed(*key) for key in itertools.product(range(20), repeat=3)}
    assert len(seeds) == 20**3
    assert all(0 <= seed < 1 << 64 for seed in seeds)


_ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)).map(lambda p: (p[0], p[0] + p[1])), max_size=6)


@given(_ranges)
def test_ranges_are_merged_and_parsed_from_their_text(ranges: list[tuple[int, int]]) -> None:
    joined = merge_ranges(ranges)
    numbers = {n for first, last in ranges for n in range(first, last + 1)}
    assert {n for n in range(80) if batch_order.is_in_ranges(joined, n)} == numbers
    assert parse_ranges(format_ranges(joined)) == joined
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(joined))


@pytest.mark.parametrize("text", ["x", "3-", "-3", "5-4", "1;2", "1-2-3"])
def test_malformed_ranges_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="names no batches"):
        parse_ranges(text)


@pytest.mark.slow
@given(
    size=st.integers(1, 60), last=st.sampled_from(["short", "drop", "pad"]), seed=st.integers(0, 5),
    runs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=8), extra=st.integers(0, 9),
)  # fmt: skip
@settings(deadline=None)
def test_any_sequence_of_restarts_gives_the_same_batches(
    size: int, last: Any, seed: int, runs: list[tuple[int, int]], extra: int
) -> None:
    """Each run has a number of ranks and ends after some steps. Together they give the batches of one run on one rank."""
    global_batch = max(ranks for ranks, _ in runs) + extra
    plan = EpochPlan(size, global_batch, last)
    if last == "drop" and size < global_batch:
        return
    steps = sum(count for _, count in runs)
    at, seen = plan.skip_ahead(Cursor()), []
    for world_size, count in runs:
        cursors = [at] * world_size
        for _ in range(count):
            parts = []
            for rank in range(world_size):
                batch = plan.batch(cursors[rank])
                assert batch.number == len(seen)
                samples = epoch_order(size, seed, batch.epoch)
                parts.append([int(samples[p % size]) for p in batch.share(rank, world_size)])
                cursors[rank] = batch.after
            seen.append([sample for part in parts for sample in part])
        assert len(set(cursors)) == 1, "all ranks are at the same position"
        at = cursors[0]
    expected = uninterrupted(size, global_batch, seed, steps + 1, last)
    assert seen == expected[:steps]


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(["short", "drop", "pad"]), _ranges)
@settings(deadline=None)
def test_skipped_batches_leave_the_others_unchanged(
    size: int, global_batch: int, last: Any, ranges: list[tuple[int, int]]
) -> None:
    if last == "drop" and size < global_batch:
        return
    whole, some = EpochPlan(size, global_batch, last), EpochPlan(size, global_batch, last, merge_ranges(ranges))
    at, kept = some.skip_ahead(Cursor()), []
    while at.batch < 80:
        batch = some.batch(at)
        kept.append((batch.number, batch.epoch, batch.start, batch.stop))
        at = batch.after
    at, every_batch = whole.skip_ahead(Cursor()), []
    while at.batch < 80:
        batch = whole.batch(at)
        every_batch.append((batch.number, batch.epoch, batch.start, batch.stop))
        at = batch.after
    assert kept == [b for b in every_batch if not batch_order.is_in_ranges(merge_ranges(ranges), b[0])]


@pytest.mark.parametrize("last", ["short", "drop", "pad"])
def test_each_epoch_has_its_batches_in_order(last: str) -> None:
    made = loader(18, last=last)
    found = []
    for epoch in range(3):
        assert made.epoch == epoch
        epoch_batches = list(made)
        assert len(epoch_batches) == len(made)
        found += epoch_batches
    assert found == uninterrupted(18, 4, 3, 3, last)
    assert made.batch == len(found) - 1


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_prefetched_by_workers_do_not_count(workers: int) -> None:
    expected = uninterrupted(20, 4, 3, 3)
    first = loader(num_workers=workers)
    assert list(itertools.islice(first.forever(), 7)) == expected[:7]
    state = first.state_dict()
    assert (state["epoch"], state["sample"], state["batch"]) == (1, 8, 7)
    assert all(type(value) is int for value in state.values())
    again = loader(num_workers=workers, seed=99)  # the saved seed counts
    again.load_state_dict(state)
    assert list(itertools.islice(again.forever(), 8)) == expected[7:]


def test_an_iterator_continues_from_a_restored_position() -> None:
    """The iterator existed before the restore."""
    expected = uninterrupted(20, 4, 3, 3)
    made = loader()
    batches = made.forever()
    state = [made.state_dict() for _ in itertools.islice(batches, 8)][-1]
    next(batches)
    made.load_state_dict(state)
    assert [next(batches) for _ in range(4)] == expected[8:12]


def test_a_loop_over_an_epoch_continues_after_a_break() -> None:
    expected = uninterrupted(20, 4, 3, 1)
    made = loader(num_workers=1, persistent_workers=True)
    found = []
    while made.epoch == 0:
        for batch in made:
            found.append(batch)
            if len(found) % 2 == 0:
                break
    assert found == expected


@pytest.mark.slow
def test_randomness_depends_on_the_sample_alone() -> None:
    """It does not depend on workers, ranks, or the start of a run; the random generators of the loop are unchanged."""
    expected = [x for batch in itertools.islice(loader(dataset=RandomlyTransformed(10)).forever(), 5) for x in batch]
    assert len({x[1] for x in expected}) == len({x[3] for x in expected}) == len(expected), (
        "the second epoch has other random numbers"
    )
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    free = [(random.random(), np.random.rand(), float(torch.rand(()))) for _ in range(5)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    many = [loader(dataset=RandomlyTransformed(10), rank=r, world_size=2, num_workers=r).forever() for r in range(2)]
    found, drawn = [], []
    for _ in range(5):
        found += [x for batches in many for x in next(batches)]
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert found == expected
    assert drawn == free


def test_a_dataset_may_return_several_samples_at_once(tmp_path: Path) -> None:
    class Several(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(i, random.random()) for i in indices]

    one, other = loader(dataset=Several(20)), loader(dataset=Several(20))
    first = list(one)
    assert [[i for i, _ in batch] for batch in first] == uninterrupted(20, 4, 3, 1)
    next(iter(other))
    assert list(other) == first[1:]


def test_tensors_are_collated() -> None:
    batch = next(iter(loader(dataset=torch.utils.data.TensorDataset(torch.arange(20.0)), collate_fn=None, shuffle=False)))
    assert torch.equal(batch[0], torch.arange(4.0))


def test_batches_in_the_variable_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(batch_order.SKIP_VARIABLE, "1,4-6")
    expected = uninterrupted(20, 4, 3, 2)
    made = loader()
    found = [(made.batch, batch) for batch in itertools.islice(made.forever(), 6)]
    assert found == [(n, expected[n]) for n in (0, 2, 3, 7, 8, 9)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 3, "rank": 0, "world_size": 4}, "leaves some of 4 ranks without a sample"),
        ({"rank": 0, "world_size": 4, "size": 21}, "1 sample for 4 ranks; use last='drop' or 'pad'"),
        ({"rank": 4, "world_size": 4}, "rank=4: with world_size=4, give a rank from 0 to 3"),
        ({"rank": 0, "world_size": None}, "or neither"),
        ({"sampler": None, "drop_last": True}, "drop_last, sampler: leave this out"),
        ({"last": "drop", "size": 3}, "3 samples make no batch of 4"),
        ({"last": "some"}, "use 'short', 'drop' or 'pad'"),
        ({"dataset": iter([1])}, "use ckpt.data.Stream"),
        ({"dataset": Numbers}, "type has no length"),
        ({"dataset": {1, 2}}, "set has no __getitem__"),
        ({"size": 0}, "the dataset has no samples"),
        ({"size": 0, "last": "drop"}, "the dataset has no samples"),
        ({"num_workers": -1}, "num_workers"),
        ({"num_worker": 1}, "num_worker"),
    ],
)
def test_impossible_options_of_a_loader_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        loader(**options)


_NO_COUNTS = (True, False, "4", 4.0, None, 0, -1, np.float64(4), [4])
_NO_FUNCTIONS = (0, 4.0, "4", True, [4])


@pytest.mark.parametrize("kind", ["loader", "stream"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("global_batch", value) for value in _NO_COUNTS),
        *(("world_size", value) for value in _NO_COUNTS),
        *(("rank", value) for value in (True, "0", 0.0, None, -1, [0])),
        *(("last", value) for value in (None, 0, True, ["short"], np.array(["short", "drop"]))),
    ],
)
def test_arguments_of_a_wrong_type_or_sign_are_refused(kind: str, name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        loader(**{name: value}) if kind == "loader" else stream(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seed", value) for value in (-1, True, "3", 3.0, None, [3])),
        *(("shuffle", value) for value in ("false", 0, 1.0, None)),
        *(("collate_fn", value) for value in _NO_FUNCTIONS),
    ],
)
def test_arguments_that_only_a_loader_has_are_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}="):
        loader(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("seek", value) for value in _NO_FUNCTIONS), *(("collate", value) for value in (None, *_NO_FUNCTIONS))],
)
def test_functions_that_only_a_stream_has_are_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}="):
        stream(**{name: value})


def test_whole_numbers_of_numpy_are_taken() -> None:
    made = loader(global_batch=np.int64(4), seed=np.uint8(3), shuffle=np.True_, rank=np.int32(0), world_size=np.int64(1))
    assert list(made) == uninterrupted(20, 4, 3, 1)
    assert {type(value) for value in made.state_dict().values()} == {int}


def test_a_position_of_another_dataset_is_refused() -> None:
    state = loader(20).state_dict()
    with pytest.raises(InvalidArgument, match="has 24 samples, and had 20"):
        loader(24).load_state_dict(state)


def test_a_refused_position_leaves_a_loader_as_it_was() -> None:
    """With four ranks, the last batch of an epoch from sample 12 has one sample, which is refused."""
    made = loader(20, rank=1, world_size=4, seed=5, global_batch=4)
    batches = made.forever()
    next(batches)
    before = made.state_dict()
    refused = loader(20).state_dict() | {"epoch": 7, "sample": 3, "batch": 9, "seed": 99, "shuffle": 0}
    incomplete = [{key: value for key, value in refused.items() if key != left_out} for left_out in refused]
    for state in (refused, *incomplete):
        with pytest.raises((InvalidArgument, KeyError)):
            made.load_state_dict(state)
        assert made.state_dict() == before
    other = loader(20, rank=1, world_size=4, seed=5, global_batch=4).forever()
    assert [next(batches) for _ in range(7)] == list(itertools.islice(other, 1, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make": range(97)}, r"make=range\(0, 97\): use a function of the number of an epoch .* lambda epoch: names"),
        ({"make": lambda epoch: range(97), "seek": 3}, "seek=3: use a function of an epoch and an item"),
        ({"make": lambda epoch: range(97), "last": "pad"}, "use 'short' or 'drop'"),
    ],
)
def test_impossible_options_of_a_stream_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        data.Stream(**options, global_batch=12)


def stream(size: int = 10, rank: int = 0, world_size: int = 1, **options: Any) -> data.Stream:
    """Return a stream whose items are numbers that show their epoch."""

    def items(epoch: int) -> Iterator[int]:
        yield from range(1000 * epoch, 1000 * epoch + size)

    return data.Stream(items, **{"global_batch": 4, "rank": rank, "world_size": world_size} | options)


@pytest.mark.parametrize("last", ["short", "drop"])
@pytest.mark.parametrize("seek", [None, lambda epoch, n: range(1000 * epoch + n, 1000 * epoch + 10)])
def test_a_stream_continues_after_any_restarts(last: Any, seek: Any) -> None:
    tail = [[8, 9]] if last == "short" else []
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], *tail]
    expected = [[1000 * e + i for i in batch] for e in range(4) for batch in epoch]
    for ends in itertools.combinations(range(1, 8), 2):
        state: Any = None
        found = []
        for end in (*ends, 8):
            ranks = [stream(rank=r, world_size=3, last=last, seek=seek) for r in range(3)]
            for each in ranks:
                if state is not None:
                    each.load_state_dict(state)
            batches = [each.forever() for each in ranks]
            while len(found) < end:
                found.append([item for b in batches for item in next(b)])
            assert len({str(each.state_dict()) for each in ranks}) == 1
            state = ranks[0].state_dict()
        assert found == expected[:8]


def test_a_stream_skips_batches_in_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(batch_order.SKIP_VARIABLE, "0,2")
    assert list(itertools.islice(stream().forever(), 3)) == [[4, 5, 6, 7], [1000, 1001, 1002, 1003], [1004, 1005, 1006, 1007]]


def test_an_iterator_of_a_stream_continues_from_a_restored_position() -> None:
    made = stream()
    batches = made.forever()
    next(batches)
    state = made.state_dict()
    next(batches)
    made.load_state_dict(state)
    assert next(batches) == [4, 5, 6, 7]


def test_an_empty_stream_raises_an_error() -> None:
    with pytest.raises(ckpt.CkptError, match="epoch 0 has no batch"):
        next(stream(0).forever())
