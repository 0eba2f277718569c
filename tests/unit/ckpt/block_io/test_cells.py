"""Parts of blocks: only their cells are read, and each cell is verified, for any parts in any order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.processes import SOAK
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.block_io.block_reader import read_leaves
from ckpt.block_io.read_plan import Target
from ckpt.format.digest import CELL_BYTES
from ckpt.state.boxes import Box
from ckpt.state.leaves import as_leaf

LENGTHS = {"x": 12 * CELL_BYTES, "y": 5 * CELL_BYTES + 999, "z": 3 * CELL_BYTES + 7, "s": 1000}
ARRAYS = {n: np.random.default_rng(i).integers(0, 255, length, dtype=np.uint8) for i, (n, length) in enumerate(LENGTHS.items())}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[ckpt.Checkpoint, Path, dict[str, int]]:
    """Return a step, its pack, and the position in the pack at which each array begins."""
    checkpoint = ckpt.save(ARRAYS, tmp_path_factory.mktemp("cells"), 0, codec="none")
    (name,) = [pack.name for pack in checkpoint.commit.packs]
    pack = Path(checkpoint.store.root) / name  # type: ignore[attr-defined]
    return checkpoint, pack, {name: pack.read_bytes().find(array[:500].tobytes()) for name, array in ARRAYS.items()}


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, int, int]:
    """Draw the name of an array and a range of its bytes."""
    name = draw(st.sampled_from(sorted(LENGTHS)))
    first = draw(st.integers(0, LENGTHS[name] - 1))
    return name, first, min(LENGTHS[name], first + draw(st.integers(1, 3 * CELL_BYTES)))


def read(checkpoint: ckpt.Checkpoint, parts: list[tuple[str, int, int]]) -> list[np.ndarray]:
    """Return the bytes of these ranges."""
    found = [np.zeros(last - first, np.uint8) for _, first, last in parts]
    boxes = [Box((first,), (last - first,)) for _, first, last in parts]
    targets = [Target(name, as_leaf(out), box) for (name, _, _), out, box in zip(parts, found, boxes, strict=True)]
    read_leaves(checkpoint.store, checkpoint.manifest(), targets, "here")
    return found


@pytest.mark.soak
@settings(max_examples=2000 if SOAK else 150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(ranges(), min_size=1, max_size=6), damage=st.none() | ranges())
def test_any_parts_in_any_order_are_right_or_refused(
    saved: tuple[ckpt.Checkpoint, Path, dict[str, int]], parts: list[tuple[str, int, int]], damage: tuple[str, int, int] | None
) -> None:
    """The bytes are those that were saved, or an error is raised; damaged bytes are never returned."""
    checkpoint, pack, begins = saved
    hit = damage is not None and any(n == damage[0] and a <= damage[1] < b for n, a, b in parts)
    data = pack.read_bytes()
    if damage is not None:
        changed = bytearray(data)
        changed[begins[damage[0]] + damage[1]] ^= 1
        pack.write_bytes(changed)
    try:
        if hit:
            with pytest.raises(ckpt.IntegrityError):
                read(checkpoint, parts)
            return
        try:
            found = read(checkpoint, parts)
        except ckpt.IntegrityError:
            assert damage is not None  # in the same cell as a part, but not in the part
            return
        assert all(np.array_equal(array, ARRAYS[n][a:b]) for array, (n, a, b) in zip(found, parts, strict=True))
    finally:
        pack.write_bytes(data)


def test_damage_is_found_whichever_part_is_read_first(saved: tuple[ckpt.Checkpoint, Path, dict[str, int]]) -> None:
    checkpoint, pack, begins = saved
    data = pack.read_bytes()
    changed = bytearray(data)
    changed[begins["x"] + 2 * CELL_BYTES + 5] ^= 1
    pack.write_bytes(changed)
    try:
        for parts in ([("x", 2, 4), ("x", 4, 6)], [("x", 4, 6), ("x", 2, 4)]):
            with pytest.raises(ckpt.IntegrityError):
                read(checkpoint, [(name, a * CELL_BYTES, b * CELL_BYTES) for name, a, b in parts])
    finally:
        pack.write_bytes(data)
