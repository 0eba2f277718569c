"""A changed block is stored as a difference to the last full one where that is smaller, and every step loads bit for bit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drifting_states import assert_drifting_steps_load, base_of_weights, drifting_state, pack_step, weight_row
from helpers.processes import finish, python
from helpers.rank_threads import CountingStore, all_well, assert_equal, on_ranks
from helpers.repositories import assert_clean
from helpers.states import assert_same

import ckpt
from ckpt.format import manifest_parquet
from ckpt.groups.base import Group
from ckpt.saving.difference_encoder import DifferenceSize, difference_pays, is_usable_base

SAVE_ONE = """
import sys, ckpt
from helpers.drifting_states import drifting_state
ckpt.save(drifting_state(int(sys.argv[2])), sys.argv[1], int(sys.argv[2]), full_every=10)
"""


def save(root: Any, *steps: int, **options: Any) -> None:
    """Save drifting states."""
    for step in steps:
        ckpt.save(drifting_state(step), root, step, **{"full_every": 10, **options})


def metadata(checkpoint: ckpt.Checkpoint) -> tuple[str, set[str]]:
    """Return the format version and the columns of the manifest of a step."""
    import pyarrow.parquet as pq

    schema = pq.ParquetFile(io.BytesIO(checkpoint.verified(checkpoint.commit.manifests[0]))).schema_arrow
    return schema.metadata[b"format"].decode(), set(schema.names)


def test_the_difference_is_small_and_its_base_is_stored_in_full(tmp_path: Path) -> None:
    save(tmp_path, 0, 1, 2, 3)
    assert_drifting_steps_load(tmp_path)
    full = weight_row(tmp_path, 0)
    for step in (1, 2, 3):
        row, base = weight_row(tmp_path, step), base_of_weights(tmp_path, step)
        assert pack_step(row.pack) == step
        assert row.stored < full.stored / 5
        assert (base.pack, base.position, base.digest) == (full.pack, full.position, full.digest)
    assert ckpt.open(tmp_path)[3].commit.written_bytes < ckpt.open(tmp_path)[0].commit.written_bytes / 3
    assert_clean(tmp_path)


def test_the_first_save_of_each_range_is_full_and_frees_the_base_before(tmp_path: Path) -> None:
    save(tmp_path, 8, 9, keep=1)
    assert base_of_weights(tmp_path, 9).pack.startswith("steps/8/")
    assert (tmp_path / base_of_weights(tmp_path, 9).pack).exists(), "keep=1 has deleted the base that the last step needs"
    assert_drifting_steps_load(tmp_path, 9)
    save(tmp_path, 10, keep=1)
    assert weight_row(tmp_path, 10).base is None
    save(tmp_path, 11, 12, keep=1)
    assert pack_step(base_of_weights(tmp_path, 12).pack) == 10
    assert_drifting_steps_load(tmp_path, 12)
    ckpt.save({**drifting_state(13), "frozen": np.ones(9)}, tmp_path, 13, full_every=10, keep=1)
    assert not list((tmp_path / "steps" / "8").rglob("*.pack")), "the base of a deleted step is kept"
    assert_clean(tmp_path)


@pytest.mark.slow
def test_a_restarted_process_continues_with_the_same_base(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        finish(python(SAVE_ONE, tmp_path, step))
    assert [pack_step(base_of_weights(tmp_path, step).pack) for step in (2, 3)] == [1, 1]
    assert_drifting_steps_load(tmp_path, 3)


def test_an_unchanged_difference_is_referred_to_together_with_its_base(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    same = {**drifting_state(2), "moments": np.zeros(5)}
    ckpt.save(same, tmp_path, 3, full_every=10, keep=1)
    row = weight_row(tmp_path, 3)
    assert (pack_step(row.pack), pack_step(base_of_weights(tmp_path, 3).pack)) == (2, 1)
    assert_same(ckpt.load(tmp_path), same)
    finish(python("import ckpt, sys; ckpt.save(ckpt.load(sys.argv[1]), sys.argv[1], 4, keep=1)", tmp_path))
    assert weight_row(tmp_path, 4)[5:] == row[5:], "another process has not referred to the same blocks"
    assert_same(ckpt.load(tmp_path), same)
    assert_clean(tmp_path)


def test_blocks_that_change_entirely_are_full_and_their_bases_are_read_once(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    reads = []
    for step in range(4):
        CountingStore.read_ranges = []
        ckpt.save({"moments": np.random.default_rng(step).standard_normal(100_000)}, store, step, full_every=10)
        reads.append(len(CountingStore.read_ranges))
        assert ckpt.open(tmp_path)[step].manifest().rows[0].base is None
    assert reads[1] > 0, "the save does not consider a difference"
    assert reads[3] == 0, "a base whose difference did not pay is read again"


def test_steps_without_differences_keep_the_columns_of_format_1(tmp_path: Path) -> None:
    """A program that knows only format 1 reads these steps, and refuses those of format 2."""
    save(tmp_path, 1, 2)
    save(tmp_path, 3, full_every=None)
    assert metadata(ckpt.open(tmp_path)[1]) == ("1", set(manifest_parquet.COLUMNS))
    assert metadata(ckpt.open(tmp_path)[2]) == ("2", {*manifest_parquet.COLUMNS, *manifest_parquet.BASE_COLUMNS})
    assert metadata(ckpt.open(tmp_path)[3]) == ("1", set(manifest_parquet.COLUMNS))


@pytest.mark.parametrize("options", [{"full_every": None}, {"full_every": 1}, {"digest": "blake3"}])
def test_without_differences_all_changed_blocks_are_full(tmp_path: Path, options: dict[str, Any]) -> None:
    if options.get("digest") == "blake3":
        pytest.importorskip("blake3")
    save(tmp_path, 1, 2, **options)
    assert weight_row(tmp_path, 2).base is None
    assert_drifting_steps_load(tmp_path, 2)


@pytest.mark.parametrize("full_every", [0, -1, True, 2.5, "always"])
def test_an_invalid_range_is_refused(tmp_path: Path, full_every: Any) -> None:
    with pytest.raises(ckpt.InvalidArgument, match="full_every"):
        ckpt.save(drifting_state(0), tmp_path, 0, full_every=full_every)


def test_several_copies_of_blocks_are_refused_together_with_differences(tmp_path: Path) -> None:
    with pytest.raises(ckpt.InvalidArgument, match="copies=1"):
        ckpt.Checkpointer(tmp_path, keep=ckpt.Keep(3, copies=2), full_every=10)


def test_a_codec_of_the_base_is_decoded(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, codec={"id": "zlib", "level": 1})
    assert "zlib" in (base_of_weights(tmp_path, 2).codec or "")
    assert_drifting_steps_load(tmp_path, 2)


def test_a_part_of_a_difference_is_loaded_and_read_from_two_blocks(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    expected = drifting_state(3)["weights"]
    lazy = ckpt.open(tmp_path)[3]["weights"]
    assert np.array_equal(lazy[1000:1010], expected[1000:1010])
    assert np.array_equal(np.asarray(lazy), expected)
    CountingStore.read_ranges = []
    part = ckpt.load(CountingStore(tmp_path), only="weights", step=3)
    assert np.array_equal(part["weights"], expected)
    assert len({(name, begin) for name, begin, _ in CountingStore.read_ranges}) == 2


def test_a_background_save_stores_differences(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every=None, keep=2, full_every=10) as ck:
        for step in range(1, 5):
            ck.save(step, drifting_state(step))
    assert pack_step(base_of_weights(tmp_path, 4).pack) == 1
    assert assert_drifting_steps_load(tmp_path, 4) == [3, 4]


def test_after_a_roll_back_no_step_has_a_base_of_the_abandoned_line(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every=None, full_every=10) as ck:
        for step in (1, 2, 3, 4):
            ck.save(step, drifting_state(step), blocking=True)
        ck.restore(drifting_state(0), step=2)
        again = {**drifting_state(3), "weights": drifting_state(3)["weights"] + np.float32(1)}
        ck.save(3, again, blocking=True)
    row = weight_row(tmp_path, 3)
    assert row.base is None or pack_step(row.base.pack) < 3
    assert_same(ckpt.load(tmp_path), again)
    assert_same(ckpt.load(tmp_path, step=2), drifting_state(2))


def test_a_lower_step_after_a_higher_one_has_no_later_base(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 4)
    assert weight_row(tmp_path, 4).base is None
    assert_drifting_steps_load(tmp_path)


def test_ranks_store_differences_and_other_ranks_load_them(tmp_path: Path) -> None:
    def shard(group: Group, step: int, rows: int = 16) -> dict[str, Any]:
        """The first half of the array drifts, the second is new in each step."""
        whole = np.concatenate([drifting_state(step)["weights"], np.random.default_rng(step).random(120_000, np.float32)])
        whole = whole.reshape(rows, -1)
        share = rows // group.size
        own = whole[group.rank * share : (group.rank + 1) * share].copy()
        return {"w": ckpt.Shard(own, whole.shape, (group.rank * share, 0)), "step": step}

    for step in (1, 2, 3):
        all_well(on_ranks(4, lambda g, step=step: ckpt.save(shard(g, step), tmp_path, step, group=g, full_every=10, keep=1)))
    found = ckpt.open(tmp_path)[3].manifest().rows
    assert [row.base is not None for row in found] == [True, True, False, False], "not only the ranks that drift have them"

    def load(group: Group) -> bool:
        like = shard(group, 0)
        ckpt.load(tmp_path, like, group=group)
        return np.array_equal(like["w"].local, shard(group, 3)["w"].local)

    for readers in (1, 2, 4, 8):
        assert all(all_well(on_ranks(readers, load))), readers
    assert_equal(ckpt.load(tmp_path, group=None)["step"], 3)
    assert ckpt.open(tmp_path)[3].verify() > 0
    assert_clean(tmp_path)


def test_a_save_with_another_number_of_ranks_stores_full_blocks(tmp_path: Path) -> None:
    def state(step: int) -> dict[str, Any]:
        return {"weights": drifting_state(step)["weights"]}

    for step, ranks in ((1, 2), (2, 3), (3, 1)):
        all_well(on_ranks(ranks, lambda g, step=step: ckpt.save(state(step), tmp_path, step, group=g, full_every=10)))
        assert_equal(ckpt.load(tmp_path, group=None), state(step))
        assert ckpt.open(tmp_path)[step].verify() > 0


@pytest.mark.parametrize(
    ("base", "step", "full_every", "usable"),
    [(10, 11, 10, True), (10, 19, 10, True), (10, 20, 10, False), (9, 10, 10, False), (12, 11, 10, False), (11, 11, 10, False),
     (0, 1, 1, False)],
)  # fmt: skip
def test_a_base_is_an_earlier_step_of_the_same_range(base: int, step: int, full_every: int, usable: bool) -> None:
    assert is_usable_base(base, step, full_every) == usable


@pytest.mark.parametrize(
    ("raw", "full", "difference", "pays"),
    [(8 << 20, 8 << 20, 1 << 20, True), (8 << 20, 8 << 20, 7 << 20, False), (8 << 20, 1 << 20, 900 << 10, False),
     (20_000, 20_000, 15_000, True), (9000, 9000, 8000, True), (8000, 8000, 5000, False)],
)  # fmt: skip
def test_a_difference_pays_if_it_saves_a_fifth_in_whole_pages(raw: int, full: int, difference: int, pays: bool) -> None:
    assert difference_pays(DifferenceSize(raw, full, difference)) == pays
