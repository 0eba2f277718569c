"""Orbax's own CheckpointManager stores an item by the handler of ckpt, and TensorStore reads arrays of a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import ckpt
from ckpt.adapters.orbax_handler import CkptHandler, CkptRestore, CkptSave
from ckpt.adapters.tensorstore import open_array


def state(start: float) -> dict[str, Any]:
    params = {"kernel": jnp.full((200, 300), start), "bias": jnp.arange(3.0).astype(jnp.bfloat16)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "key": jax.random.key(7), "step": 3}


def assert_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.array_equal(mine, other)
        assert getattr(mine, "dtype", None) == getattr(other, "dtype", None)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_manager_of_orbax_saves_and_restores(tmp_path: Path, is_async: bool) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=is_async)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 2, 3):
            items = ocp.args.Composite(state=CkptSave(state(step)), position=ocp.args.JsonSave({"at": step}))
            assert manager.save(step, args=items)
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        expected_args = ocp.args.Composite(state=CkptRestore(state(0)), position=ocp.args.JsonRestore())
        found = manager.restore(manager.latest_step(), args=expected_args)
        assert_equal(found["state"], state(3))
        assert found["position"] == {"at": 3}
        assert_equal(manager.restore(2, args=ocp.args.Composite(state=CkptRestore()))["state"]["params"], state(2)["params"])


def test_a_single_item_and_a_host_array_that_changes_after_the_save(tmp_path: Path) -> None:
    array = np.arange(1_000_000.0)
    with ocp.AsyncCheckpointer(CkptHandler()) as saver:
        saver.save(tmp_path / "one", args=CkptSave({"w": array}))
        array[:] = -1
        saver.wait_until_finished()
        found = saver.restore(tmp_path / "one", args=CkptRestore())
    assert np.array_equal(found["w"], np.arange(1_000_000.0))


def test_a_failed_save_leaves_no_step(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager, pytest.raises(ckpt.UnsupportedLeaf, match="leaf f: "):
        manager.save(1, args=ocp.args.Composite(state=CkptSave({"f": lambda: 0})))
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []


def test_a_damaged_byte_is_found(tmp_path: Path) -> None:
    with ocp.Checkpointer(CkptHandler()) as saver:
        saver.save(tmp_path / "one", args=CkptSave(state(1)))
        damage(tmp_path / "one" / "ckpt", "params.kernel")
        with pytest.raises(ckpt.IntegrityError, match=r"leaf .* of step 0"):
            saver.restore(tmp_path / "one", args=CkptRestore())


def test_another_structure_is_refused(tmp_path: Path) -> None:
    with ocp.Checkpointer(CkptHandler()) as saver:
        saver.save(tmp_path / "one", args=CkptSave({"a": jnp.zeros(3)}))
        with pytest.raises(ckpt.LeafNotFound):
            saver.restore(tmp_path / "one", args=CkptRestore({"b": jnp.zeros(3)}))
        with pytest.raises(ckpt.LeafMismatch):
            saver.restore(tmp_path / "one", args=CkptRestore({"a": jnp.zeros(4)}))


def test_the_metadata_have_shapes_and_types(tmp_path: Path) -> None:
    with ocp.Checkpointer(CkptHandler()) as saver:
        saver.save(tmp_path / "one", args=CkptSave({"a": jnp.zeros((3, 2), jnp.bfloat16)}))
        assert CkptHandler().metadata(tmp_path / "one") == {"a": jax.ShapeDtypeStruct((3, 2), jnp.bfloat16)}


# --- TensorStore -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_tensorstore_reads_a_part(tmp_path: Path, dtype: str) -> None:
    values = (np.arange(3000 * 1000) % 113).reshape(3000, 1000).astype(jnp.dtype(dtype))
    checkpoint = ckpt.save({"w": values, "scalar": np.float32(3.5)}, tmp_path)
    array = open_array(checkpoint, "w")
    assert array.shape == (3000, 1000)
    assert array.dtype.numpy_dtype == values.dtype
    assert np.array_equal(array[17:2500:3, 5].read().result(), values[17:2500:3, 5])
    assert np.array_equal(array.read().result(), values)
    assert open_array(checkpoint, "scalar").read().result() == 3.5


def test_tensorstore_reports_damage_and_a_missing_array(tmp_path: Path) -> None:
    checkpoint = ckpt.save({"w": np.arange(1000.0)}, tmp_path)
    damage(tmp_path, "w")
    with pytest.raises(ckpt.IntegrityError, match="leaf w of step 0"):
        open_array(checkpoint, "w").read().result()
    with pytest.raises(ckpt.LeafNotFound):
        open_array(checkpoint, "x")


def damage(url: Path, leaf: str) -> None:
    row = ckpt.open(url).latest().manifest().find([(leaf, None)])[0][0]
    with open(url / row.pack, "r+b") as file:
        file.seek(row.position + row.stored // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
