"""Variables of tf.distribute and DTensors: stored once, filled on all devices; a killed run resumes with equal losses."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from helpers.folders import PROGRAMS
from tensorflow.experimental import dtensor

import ckpt
from ckpt.adapters.testing import ResumeContract
from ckpt.errors import LeafMismatch, UnsupportedLeaf

ON_READ = tf.VariableSynchronization.ON_READ
KINDS = tf.VariableAggregation


class TestMirroredStrategy(ResumeContract):
    program = PROGRAMS / "tensorflow_distributed_training.py"
    arguments = ("mirrored",)


class TestMultiWorkerMirroredStrategy(ResumeContract):
    program = PROGRAMS / "tensorflow_distributed_training.py"
    arguments = ("workers",)


@pytest.fixture(scope="module", autouse=True)
def devices() -> None:
    """Divide the processor into four devices, before TensorFlow starts."""
    four = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], four)


def mirrored(value: Any, aggregation: Any = None) -> Any:
    """Return a variable on three replicas, ON_READ with an aggregation."""
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():
        if aggregation is None:
            return tf.Variable(value)
        return tf.Variable(value, synchronization=ON_READ, aggregation=aggregation, trainable=False)


def test_a_mirrored_variable_is_filled_on_all_replicas(tmp_path: Path) -> None:
    variable = mirrored([1.0, 2.0])
    ckpt.save({"v": variable}, tmp_path, 1)
    assert len(ckpt.open(tmp_path)[1].leaves()) == 1
    variable.assign([0.0, 0.0])
    assert ckpt.load(tmp_path, like={"v": variable})["v"] is variable
    assert [replica.numpy().tolist() for replica in variable.values] == [[1.0, 2.0]] * 3
    plain = tf.Variable([0.0, 0.0])
    ckpt.load(tmp_path, like={"v": plain})
    assert plain.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("aggregation", "start", "replicas"),
    [
        (KINDS.SUM, 0, [5, 6, 9]),
        (KINDS.SUM, 0.0, [0.1, 0.2, 0.4]),
        (KINDS.MEAN, 0.0, [3.0, 6.0, 9.0]),
        (KINDS.ONLY_FIRST_REPLICA, 0, [7, 8, 9]),
    ],
)
def test_what_replicas_combine_keeps_its_value_exactly(
    tmp_path: Path, aggregation: Any, start: Any, replicas: list[Any]
) -> None:
    variable = mirrored(start, aggregation)
    for replica, value in zip(variable.values, replicas, strict=True):
        replica.assign(value)
    before = variable.read_value().numpy()
    ckpt.save({"v": variable}, tmp_path, 1)
    for replica in variable.values:
        replica.assign(99)
    ckpt.load(tmp_path, like={"v": variable})
    assert variable.read_value().numpy().tobytes() == before.tobytes()
    alone = tf.Variable(start)
    ckpt.load(tmp_path, like={"v": alone})
    assert alone.numpy().tobytes() == before.tobytes()


def test_each_replica_has_its_counter_of_a_generator(tmp_path: Path) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        generator = tf.random.Generator.from_seed(3)

    @tf.function
    def draw() -> Any:
        def on_replica() -> Any:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return tf.reduce_sum(generator.uniform([3 + 2 * replica]))

        return strategy.run(on_replica)

    draw()
    ckpt.save({"g": generator}, tmp_path, 1)
    expected = [value.numpy() for value in draw().values]
    for _ in range(2):
        ckpt.load(tmp_path, like={"g": generator})
        assert [value.numpy() for value in draw().values] == expected
    alone = tf.random.Generator.from_seed(5)
    ckpt.load(tmp_path, like={"g": alone})
    assert alone.state.numpy().tolist() == ckpt.load(tmp_path)["g"]["state"].tolist()


def test_replicas_without_a_common_value_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeaf, match="leaf v: each replica has a value of its own: give the variable an aggregation="):
        ckpt.save({"v": mirrored(0.0, KINDS.NONE)}, tmp_path, 1)


def test_an_iterator_over_replicas_is_refused_with_what_to_do(tmp_path: Path) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4)))
    with pytest.raises(UnsupportedLeaf, match=r"leaf data: .*number of batches.*skip\(\)"):
        ckpt.save({"data": iterator}, tmp_path, 1)


VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)
LAYOUTS = (["x", "y"], ["y", "x"], ["x", dtensor.UNSHARDED], [dtensor.UNSHARDED, "y"], [dtensor.UNSHARDED] * 2)


def divided(spec: list[str], values: Any = VALUES) -> Any:
    """Return a DTensor over two by two devices."""
    mesh = dtensor.create_mesh([("x", 2), ("y", 2)], devices=[f"CPU:{number}" for number in range(4)])
    whole = dtensor.copy_to_mesh(tf.constant(values), dtensor.Layout.replicated(mesh, 2))
    return dtensor.relayout(whole, dtensor.Layout(spec, mesh))


def parts(value: Any) -> list[list[Any]]:
    tensor = value.read_value() if isinstance(value, tf.Variable) else value
    return [part.numpy().tolist() for part in dtensor.unpack(tensor)]


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
@pytest.mark.parametrize("other", LAYOUTS, ids=str)
def test_a_dtensor_is_loaded_into_every_layout(tmp_path: Path, spec: list[str], other: list[str]) -> None:
    ckpt.save({"variable": dtensor.DVariable(divided(spec)), "tensor": divided(spec)}, tmp_path, 1)
    assert np.asarray(ckpt.open(tmp_path)[1]["variable"]).tolist() == VALUES.tolist()
    like = {"variable": dtensor.DVariable(divided(other, VALUES * 0)), "tensor": divided(other, VALUES * 0)}
    variable = like["variable"]
    loaded = ckpt.load(tmp_path, like=like)
    assert loaded["variable"] is variable
    assert parts(variable) == parts(divided(other))
    assert parts(loaded["tensor"]) == parts(divided(other))
    assert dtensor.fetch_layout(loaded["tensor"]) == dtensor.fetch_layout(divided(other))


def test_a_dtensor_of_another_shape_is_refused_before_it_is_filled(tmp_path: Path) -> None:
    ckpt.save({"v": dtensor.DVariable(divided(["x", "y"]))}, tmp_path, 1)
    other = dtensor.DVariable(divided(["x", "y"], np.zeros((6, 4), np.float32)))
    with pytest.raises(LeafMismatch, match=r"leaf v: .* shape \[4, 6\], `like` has \[6, 4\]"):
        ckpt.load(tmp_path, like={"v": other})
    assert not np.any(parts(other))
