"""Damage of a difference or of its base is found and named, costs the steps that need it and no others, and does not spread."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drifting_states import (
    base_of_weights,
    drifting_state,
    pack_step,
    weight_row,
)
from helpers.flipped_bits import flip_bit
from helpers.forged_manifests import change_column, replace_file
from helpers.processes import finish, python, until
from helpers.small_disks import small_disk as small_disk
from helpers.states import assert_same

import ckpt
from ckpt.block_io import replicated_store
from ckpt.repository import damage_registry
from ckpt.saving import background_scrub


@pytest.fixture(autouse=True)
def _forget_damage() -> Iterator[None]:
    """Clear the damage that this process has recorded."""
    yield
    replicated_store._bad_blocks.clear()
    damage_registry._damaged.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository of four steps, the first in full."""
    folder = tmp_path / "run"
    for step in (1, 2, 3, 4):
        ckpt.save(drifting_state(step), folder, step, full_every=10)
    return folder


def run(command: str, *args: object) -> tuple[int, str]:
    """Run a command of ckpt; return its exit status and what it printed."""
    program = f"from ckpt.tools.{command} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    return done.returncode, done.stdout + done.stderr


def flip_base(root: Path) -> str:
    """Change a bit of the base of the weights; return its pack."""
    base = base_of_weights(root, 4)
    flip_bit(root / base.pack, base.position + base.stored // 2)
    return base.pack


def flip_difference(root: Path, step: int) -> str:
    """Change a bit of the difference of a step; return its pack."""
    row = weight_row(root, step)
    assert row.pack is not None
    flip_bit(root / row.pack, row.position + row.stored // 2)
    return row.pack


def cut_base(root: Path) -> str:
    """Cut the pack of the base before the end of the base."""
    base = base_of_weights(root, 4)
    os.truncate(root / base.pack, base.position + 4096)
    return base.pack


def remove_base(root: Path) -> str:
    """Delete the pack of the base."""
    base = base_of_weights(root, 4)
    (root / base.pack).unlink()
    return base.pack


@pytest.mark.parametrize("damage", [flip_base, cut_base, remove_base])
def test_damage_of_a_base_is_named_in_every_step_that_needs_it(root: Path, damage: Callable[[Path], str]) -> None:
    pack = damage(root)
    for step in (2, 3, 4):
        with pytest.raises(ckpt.IntegrityError) as error:
            ckpt.load(root, step=step, only="weights")
        for word in (f"leaf weights of step {step}", "base of a difference", pack):
            assert word in str(error.value)
        with pytest.raises(ckpt.IntegrityError, match="weights"):
            _ = ckpt.open(root)[step]["weights"][5:9]
        with pytest.raises(ckpt.IntegrityError, match=pack):
            ckpt.open(root)[step].verify()
        assert_same(ckpt.load(root, step=step, only="moments")["moments"], drifting_state(step)["moments"])
    status, output = run("inspect", root, "--verify")
    assert status == 1, output
    assert pack in output


def test_damage_of_a_difference_costs_its_step_alone(root: Path) -> None:
    pack = flip_difference(root, 3)
    with pytest.raises(ckpt.IntegrityError) as error:
        ckpt.load(root, step=3)
    assert f"leaf weights of step 3 of {root.as_uri()}: {root.as_uri()}/{pack}" in str(error.value)
    assert "base" not in str(error.value)
    for step in (1, 2, 4):
        assert_same(ckpt.load(root, step=step), drifting_state(step))


def test_a_load_of_the_newest_step_falls_back_to_one_that_is_intact(root: Path) -> None:
    flip_difference(root, 4)
    with pytest.warns(UserWarning, match="older step 3"):
        assert_same(ckpt.load(root), drifting_state(3))


@pytest.mark.parametrize("damage", [flip_base, cut_base, remove_base])
def test_a_save_after_damage_of_the_base_is_full(root: Path, damage: Callable[[Path], str]) -> None:
    """No step refers to the damaged base any more, neither of this process nor of the next."""
    pack = damage(root)
    for step in (5, 6):
        ckpt.save(drifting_state(step), root, step, full_every=10)
        assert_same(ckpt.load(root, step=step, only="weights")["weights"], drifting_state(step)["weights"])
    assert weight_row(root, 5).base is None
    assert pack_step(base_of_weights(root, 6).pack) == 5
    assert pack not in {weight_row(root, step).pack for step in (5, 6)}


def test_a_damaged_difference_is_not_referred_to(root: Path) -> None:
    """The weights do not change after step 4, whose difference another process would refer to."""
    pack = flip_difference(root, 4)
    code = """
import sys, ckpt
from helpers.drifting_states import drifting_state
ckpt.save({"weights": drifting_state(4)["weights"]}, sys.argv[1], 5, full_every=10)
"""
    finish(python(code, root))
    row = weight_row(root, 5)
    assert row.pack != pack
    assert np.array_equal(ckpt.load(root, step=5)["weights"], drifting_state(4)["weights"])


def test_the_scrub_finds_a_damaged_base(root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(background_scrub, "FIRST_PASS_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(background_scrub, "PASS_INTERVAL_SECONDS", 0.05)
    with ckpt.Checkpointer(root, every=None, full_every=10, scrub=1 << 30) as ck:
        ck.save(5, drifting_state(5), blocking=True)
        pack = flip_base(root)
        until(lambda: {2, 3, 4, 5} <= damage_registry.damaged_steps(ck.repository))
        ck.save(6, drifting_state(6), blocking=True)
    assert pack in caplog.text
    assert weight_row(root, 6).base is None
    assert np.array_equal(ckpt.load(root, step=6, only="weights")["weights"], drifting_state(6)["weights"])


def test_a_part_of_a_verification_reads_bases_as_blocks_of_their_own(root: Path) -> None:
    pack = flip_base(root)
    status, output = run("inspect", root, "--verify", "--subset", "100%")
    assert status == 1, output
    assert pack in output


def test_inspect_names_the_step_of_a_base_and_an_array_whose_base_is_missing(root: Path) -> None:
    assert "4 (base 1)" in run("inspect", root, 4)[1]
    remove_base(root)
    lines = run("inspect", root, 4)[1].splitlines()
    missing = [line.split()[0] for line in lines if "file missing" in line]
    assert missing == ["weights", "frozen"], lines


@pytest.mark.parametrize(
    ("column", "value"),
    [("base_width", 3), ("base_width", 0), ("base_width", None), ("base_position", -1), ("base_stored", 1 << 40),
     ("base_stored", -5), ("base_stored", 8), ("base_position", None), ("base_digest", None), ("base_digest", b"short"),
     ("base_pack", "steps/1/pack/none.pack"), ("base_codec", '{"id": "pickle"}'), ("codec", None), ("base_width", 1)],
)  # fmt: skip
def test_a_forged_base_is_refused(root: Path, column: str, value: Any) -> None:
    """No wrong bytes are returned, and no memory is allocated for a claimed length."""
    replace_file(root, 4, change_column(column, value), ".parquet")
    for load in (
        lambda: ckpt.load(root, step=4),
        lambda: ckpt.open(root)[4]["weights"][:],
        lambda: ckpt.open(root)[4].verify(),
    ):
        with pytest.raises(ckpt.CkptError):
            load()


def test_a_manifest_of_cryptographic_digests_with_differences_is_refused(root: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def change(data: bytes) -> bytes:
        table = pq.read_table(pa.BufferReader(data))
        sink = io.BytesIO()
        pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"digest": b"blake3"}), sink)
        return sink.getvalue()

    replace_file(root, 4, change, ".parquet")
    with pytest.raises(ckpt.IntegrityError, match="has differences"):
        ckpt.load(root, step=4)


def test_a_full_disk_between_base_and_difference_leaves_the_earlier_steps(small_disk: Path) -> None:
    def state(step: int) -> dict[str, Any]:
        return {"weights": drifting_state(step)["weights"][:60_000]}

    run = small_disk / "run"
    ckpt.save(state(1), run, 1, full_every=10)
    ckpt.save(state(2), run, 2, full_every=10)
    with pytest.raises(ckpt.StoreError):
        ckpt.save({**state(10), "more": np.random.default_rng(0).random(90_000)}, run, 10, full_every=10)
    ckpt.save(state(3), run, 3, full_every=10)
    assert pack_step(base_of_weights(run, 3).pack) == 1
    for step in (1, 2, 3):
        assert_same(ckpt.load(run, step=step), state(step))
        assert ckpt.open(run)[step].verify() > 0


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "zarr", "h5"])
def test_an_export_of_a_difference_has_the_values_of_the_state(root: Path, tmp_path: Path, suffix: str) -> None:
    if suffix == "h5":
        pytest.importorskip("h5py")
    if suffix == "zarr":
        pytest.importorskip("zarr")
    out = tmp_path / f"out.{suffix}"
    status, output = run("restore", root, out, "--step", 4, "--only", "weights")
    assert status == 0, output
    if suffix == "npz":
        found = np.load(out)["weights"]
    elif suffix == "safetensors":
        found = np.frombuffer(out.read_bytes()[-drifting_state(4)["weights"].nbytes :], np.float32)
    elif suffix == "h5":
        import h5py

        found = h5py.File(out)["weights"][...]
    else:
        import zarr

        found = zarr.open_group(str(out), mode="r")["weights"][...]
    assert np.array_equal(found, drifting_state(4)["weights"])
