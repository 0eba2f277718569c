"""ckpt-import reads checkpoints of Orbax with equal bytes, without Orbax and jax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from helpers.forged_values import STRANGE_JSON, forgeries
from helpers.imports import assert_killed_import_leaves_no_step, growth_of_memory, load_imported

import ckpt
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_formats import read_source


def make_state() -> dict[str, Any]:
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    return {
        "params": {
            "dense": {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.ones(3, jnp.bfloat16)},
            "sharded": jax.device_put(jnp.arange(64.0 * 6).reshape(64, 6), sharding),
            "large": jnp.arange(3_000_000, dtype=jnp.float32).reshape(3000, 1000),
        },
        "moments": [jnp.zeros(2, jnp.int8), np.arange(3)],
        "step": 3,
        "rate": 0.5,
    }


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif hasattr(expected, "dtype"):
        assert found.dtype == expected.dtype
        assert np.array_equal(np.asarray(found), np.asarray(expected))
    else:
        assert found == expected


def test_the_newest_step_of_a_manager(tmp_path: Path) -> None:
    state = make_state()
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(9, args=ocp.args.StandardSave({"old": jnp.ones(1)}))
        manager.save(10, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    assert_equal(load_imported(tmp_path / "orbax", "--step", 10), state)
    assert_equal(load_imported(tmp_path / "orbax" / "9"), {"old": jnp.ones(1)})
    assert list(load_imported(tmp_path / "orbax", "--only", "params.dense")["params"]) == ["dense"]
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if isinstance(x, jax.Array) else x, state["params"])
    assert_equal(ckpt.load(tmp_path / "imported", like={"params": zeros}, step=10)["params"], state["params"])


@pytest.mark.parametrize("options", [{"use_ocdbt": False}, {"use_ocdbt": True, "use_zarr3": True}], ids=str)
def test_every_layout_of_orbax_is_imported(options: dict[str, bool], tmp_path: Path) -> None:
    state = make_state()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.PyTreeSave(state))
    assert_equal(load_imported(tmp_path / "orbax"), state)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.StandardSave({"a": jnp.ones(50)}))
    for path in (tmp_path / "orbax").rglob("manifest.ocdbt"):
        path.unlink()
    with pytest.raises(CkptError, match="copy the folder again"):
        load_imported(tmp_path / "orbax")
    (tmp_path / "orbax" / "_METADATA").write_text("{")
    with pytest.raises(CkptError, match="damaged"):
        load_imported(tmp_path / "orbax")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("options", [{"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}], ids=str)
@pytest.mark.parametrize("value", [jnp.ones(50), 5], ids=["array", "scalar"])
def test_a_checkpoint_without_one_of_its_chunks_is_refused(options: dict[str, bool], value: Any, tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.PyTreeSave({"a": value, "b": jnp.zeros(5)}))
    chunks = [path for path in (tmp_path / "orbax" / "a").rglob("*") if path.is_file() and path.name[0] not in ".z"]
    assert chunks
    for path in chunks:
        path.unlink()
    with pytest.raises(CkptError, match="copy the folder again"):
        load_imported(tmp_path / "orbax")
    assert not list((tmp_path / "imported").rglob("commit.json"))


def test_a_part_of_the_metadata_is_forged(tmp_path: Path) -> None:
    """Each forged folder gives an error with advice, or a state."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        state = {"a": jnp.ones(5), "l": [np.ones(2), 3], "empty": {}}
        checkpointer.save(tmp_path / "orbax", args=ocp.args.PyTreeSave(state))
    assert set(read_source(tmp_path / "orbax", None)) == {"a", "l", "empty"}
    found: dict[str, Any] = {}
    for file in (tmp_path / "orbax" / "_METADATA", tmp_path / "orbax" / "a" / ".zarray"):
        whole = file.read_bytes()
        for forged in forgeries(json.loads(whole), STRANGE_JSON):
            file.write_text(json.dumps(forged))
            try:
                read_source(tmp_path / "orbax", None)
            except CkptError as error:
                assert "folder" in str(error) or "restore it with Orbax" in str(error)
            except Exception as error:
                found[f"{type(error).__name__}: {error}"] = forged
        file.write_bytes(whole)
    assert not list(found)


@pytest.mark.parametrize("keys", [("a", "inner"), ("a",), ("l", 1 << 40), ("l", "x"), ()])
def test_the_keys_of_an_array_lead_to_the_place_of_another(keys: tuple[str | int, ...], tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.PyTreeSave({"a": 1, "l": [2], "z": {}}))
    file = tmp_path / "orbax" / "_METADATA"
    metadata = json.loads(file.read_bytes())
    (name,) = (name for name in metadata["tree_metadata"] if "z" in name)
    metadata["tree_metadata"][name]["key_metadata"] = [
        {"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys
    ]
    file.write_text(json.dumps(metadata))
    with pytest.raises(CkptError, match="is damaged .*: copy the folder again"):
        load_imported(tmp_path / "orbax")


@pytest.mark.parametrize("key", ["../outside/a", ".", "a/.."])
def test_no_array_outside_of_the_folder_is_read(key: str, tmp_path: Path) -> None:
    for name in ("orbax", "outside"):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
            checkpointer.save(tmp_path / name, args=ocp.args.PyTreeSave({"a": np.ones(5)}))
    file = tmp_path / "orbax" / "_METADATA"
    metadata = json.loads(file.read_bytes())
    (entry,) = metadata["tree_metadata"].values()
    entry["key_metadata"] = [{"key": key, "key_type": 2}]
    file.write_text(json.dumps(metadata))
    with pytest.raises(CkptError, match="is outside of the folder|can't be opened"):
        load_imported(tmp_path / "orbax")


def test_a_killed_import_leaves_no_step(tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.StandardSave({"a": jnp.ones(50)}))
    assert_killed_import_leaves_no_step(tmp_path / "orbax")


def test_jax_is_not_imported(tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.StandardSave({"a": jnp.ones(5)}))
    program = (
        "import sys; from ckpt.tools.import_step import command; command.main(sys.argv[1:], standalone_mode=False); "
        "print([name for name in ('jax', 'orbax', 'torch') if name in sys.modules])"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "orbax"), str(tmp_path / "imported")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A small checkpoint first loads all modules; then 768 MiB in 48 chunks need little more than 256 MiB."""
    random = np.random.default_rng(1)
    states = {
        "small": {"a": jnp.ones(10)},
        "big": {f"layer{i}": random.integers(0, 2**31, (64, 1 << 16), np.int32) for i in range(48)},
    }
    for name, state in states.items():
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(tmp_path / name, args=ocp.args.StandardSave(state))
    assert growth_of_memory(tmp_path / "small", tmp_path / "big", tmp_path, absent="jax") < 400 << 20
    assert np.array_equal(ckpt.open(tmp_path / "two")[0]["layer47"][:], states["big"]["layer47"])


@pytest.mark.parametrize("options", [{"use_ocdbt": False}, {"use_ocdbt": True, "use_zarr3": True}], ids=str)
def test_a_chunk_is_decompressed_once_for_all_blocks_of_its_array(options: dict[str, bool], tmp_path: Path) -> None:
    """The shards of an array that is divided by columns are chunks of which each block has a part."""
    sharding = jax.sharding.NamedSharding(jax.make_mesh((4,), ("x",)), jax.sharding.PartitionSpec(None, "x"))
    state = {"wide": jax.device_put(jnp.arange(float(12 << 20), dtype=jnp.float32).reshape(-1, 1024), sharding)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.PyTreeSave(state))
    before = values_read()
    assert_equal(load_imported(tmp_path / "orbax"), state)
    assert len(ckpt.open(tmp_path / "imported")[0].leaves()) == 1
    # Without a cache, more than 30: each block needs the 4 chunks.
    assert 4 <= values_read() - before <= 16


def values_read() -> int:
    """Return how many chunks and other values the caches of TensorStore have read from files in this process."""
    (found,) = tensorstore.experimental_collect_matching_metrics("/tensorstore/cache/kvs_cache_read")
    return int(next(entry["value"] for entry in found["values"] if entry["category"] == "changed"))
