"""A program that is written for Orbax's CheckpointManager runs with that of ckpt.adapters.orbax, with Orbax's own arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from helpers.messages import one_line

import ckpt
from ckpt.adapters.orbax import _REFUSED_OPTIONS, CheckpointManager

USED_OPTIONS = {
    "save_interval_steps", "save_on_steps", "should_save_fn", "max_to_keep", "keep_period", "enable_async_checkpointing",
    "prevent_write_metrics",
}  # fmt: skip
OPTIONS_OF_BEST_FN = {"best_mode", "keep_checkpoints_without_metrics"}
OPTIONS_OF_POLICIES = {"enable_should_save_is_saving_in_progress_check"}
OPTIONS_OF_FILES = {
    "step_prefix", "step_format_fixed_length", "step_name_format", "create", "cleanup_tmp_directories", "file_options",
    "single_host_load_and_broadcast", "enable_background_delete", "num_deletion_threads", "enable_hns", "save_root_metadata",
    "temporary_path_class", "atomicity_options", "enable_per_process_directory_creation", "lightweight_initialize",
}  # fmt: skip
"""Names of directories, and how files are written, listed and removed."""


def state(start: float) -> dict[str, Any]:
    params = {"kernel": jnp.full((2, 3), start), "bias": jnp.arange(3.0)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": 3}


def equal(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(map(jnp.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def steps_of(manager: Any) -> tuple[list[bool], list[int], int | None]:
    """Run the same calls on a manager; return what save returned, and the steps."""
    saved = []
    for step in range(8):
        saved.append(manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(2, float(step))})))
        manager.wait_until_finished()
    saved.append(manager.save(8, args=ocp.args.StandardSave({"w": jnp.zeros(2)}), force=True))
    manager.wait_until_finished()
    return saved, list(manager.all_steps()), manager.latest_step()


@pytest.mark.parametrize(
    "options", [{"save_interval_steps": 3, "max_to_keep": 2}, {"save_interval_steps": 4, "save_on_steps": [2]}]
)
def test_the_same_steps_are_saved_and_kept_as_by_orbax(tmp_path: Path, options: dict[str, Any]) -> None:
    made = ocp.CheckpointManagerOptions(**options)
    with ocp.CheckpointManager(tmp_path / "orbax", options=made) as theirs:
        want = steps_of(theirs)
    with CheckpointManager(tmp_path / "ckpt", options=made) as ours:
        assert steps_of(ours) == want
        assert ours.restore(args=ocp.args.StandardRestore({"w": jnp.ones(2)}))["w"].tolist() == [0, 0]


def test_a_state_is_restored_into_an_abstract_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() is None
        with pytest.raises(FileNotFoundError):
            manager.restore(None, args=ocp.args.StandardRestore(state(0.0)))
        assert manager.save(3, args=ocp.args.StandardSave(state(1.0)), metrics={"loss": 0.5})
        abstract = jax.eval_shape(lambda: state(0.0))
        for step in (None, 3):
            loaded = manager.restore(step, args=ocp.args.StandardRestore({**abstract, "step": 0}))
            assert equal(loaded, state(1.0))
        assert manager.restore(3)["params"]["kernel"].tolist() == [[1, 1, 1], [1, 1, 1]]
        assert manager.metrics(3) == {"loss": 0.5}
        with pytest.raises(ckpt.LeafMismatch, match="leaf default.params.kernel: .* shape"):
            wrong = {**abstract["params"], "kernel": jax.ShapeDtypeStruct((2, 4), jnp.float32)}
            manager.restore(3, args=ocp.args.StandardRestore({"params": wrong}))


def test_several_items_are_restored_in_a_composite(tmp_path: Path) -> None:
    def make(start: float) -> TrainState:
        return TrainState.create(apply_fn=abs, params={"w": jnp.full(2, start)}, tx=optax.sgd(0.1))

    def dataset() -> Any:
        return iter(grain.MapDataset.source(np.arange(20)).shuffle(seed=1).to_iter_dataset())

    data = dataset()
    want = [int(next(data)) for _ in range(6)][3:]
    data = dataset()
    for _ in range(3):
        next(data)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(
            state=ocp.args.StandardSave(make(1.0)), data=grain.checkpoint.CheckpointSave(data),
            config=ocp.args.JsonSave({"width": 3}),
        ))  # fmt: skip
        like = dataset()
        loaded = manager.restore(1, args=ocp.args.Composite(
            state=ocp.args.StandardRestore(make(0.0)), data=grain.checkpoint.CheckpointRestore(like),
            config=ocp.args.JsonRestore(),
        ))  # fmt: skip
        assert type(loaded) is ocp.args.Composite
        assert loaded.state.params["w"].tolist() == [1, 1]
        assert loaded.state.apply_fn is abs
        assert loaded.data is like
        assert [int(next(like)) for _ in range(3)] == want
        assert loaded.config == {"width": 3}


def test_a_failed_save_is_raised(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ckpt.UnsupportedLeaf, match="leaf default.f: .* a function is code"):
            manager.save(0, args=ocp.args.PyTreeSave({"f": jnp.tanh}))
        assert manager.all_steps() == []
        assert manager.save(1, args=ocp.args.PyTreeSave({"f": jnp.ones(2)}))
        with pytest.raises(ckpt.InvalidArgument, match="step 1 exists"):
            manager.save(1, args=ocp.args.PyTreeSave({"f": jnp.ones(2)}), force=True)


def test_after_a_restore_of_an_older_step_the_next_one_is_newer(tmp_path: Path) -> None:
    """Orbax would not save it, since its number is smaller than that of the step that was abandoned."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 5):
            manager.save(step, args=ocp.args.PyTreeSave({"w": jnp.full(2, float(step))}))
        manager.restore(2, args=ocp.args.PyTreeRestore({"w": jnp.zeros(2)}))
        assert manager.save(3, args=ocp.args.PyTreeSave({"w": jnp.full(2, 3.5)}))
        manager.wait_until_finished()
        assert manager.latest_step() == 3
        assert manager.save(5, args=ocp.args.PyTreeSave({"w": jnp.full(2, 5.5)}))
        manager.wait_until_finished()
        for step in (3, 5):
            loaded = manager.restore(step, args=ocp.args.PyTreeRestore({"w": jnp.zeros(2)}))
            assert loaded["w"].tolist() == [step + 0.5] * 2


def test_each_option_of_orbax_is_used_or_refused_unless_it_is_about_files() -> None:
    refused = {name.partition(".")[0] for name in _REFUSED_OPTIONS}
    fields = {field.name for field in dataclasses.fields(ocp.CheckpointManagerOptions)}
    assert fields - USED_OPTIONS - OPTIONS_OF_BEST_FN - OPTIONS_OF_POLICIES - OPTIONS_OF_FILES - refused == set()


def test_metrics_are_not_saved_where_the_options_prevent_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(prevent_write_metrics=True)) as manager:
        manager.save(1, args=ocp.args.PyTreeSave({"w": jnp.ones(2)}), metrics={"loss": 0.5})
        manager.wait_until_finished()
        assert manager.metrics(1) is None


@pytest.mark.parametrize("name", _REFUSED_OPTIONS)
def test_an_option_without_a_counterpart_is_refused(tmp_path: Path, name: str) -> None:
    first, _, second = name.partition(".")
    options = SimpleNamespace(**{first: SimpleNamespace(**{second: {1}}) if second else {1}})
    with pytest.raises(ckpt.InvalidArgument) as error:
        CheckpointManager(tmp_path, options=options)
    one_line(error, f"options.{name} has no counterpart")


def test_what_has_no_counterpart_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ckpt.InvalidArgument) as option:
        CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"]))
    one_line(option, "options.best_fn", "repository of its own")
    options = ocp.CheckpointManagerOptions(async_options=ocp.AsyncOptions(post_finalization_callback=lambda: None))
    with pytest.raises(ckpt.InvalidArgument, match=r"options\.async_options\.post_finalization_callback"):
        CheckpointManager(tmp_path, options=options)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ckpt.InvalidArgument, match="args of w: 1 has no item: use those of orbax.checkpoint.args"):
            manager.save(1, args={"w": 1})
        manager.save(1, args=ocp.args.PyTreeSave({"w": jnp.ones(2)}))
        restore_args = {"w": ocp.ArrayRestoreArgs(dtype=jnp.float16)}
        with pytest.raises(ckpt.InvalidArgument, match="restore_args has no counterpart"):
            manager.restore(1, args=ocp.args.PyTreeRestore(restore_args=restore_args))
