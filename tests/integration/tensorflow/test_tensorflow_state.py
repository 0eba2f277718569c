"""Tensors, variables and objects of tensorflow: saved as plain bytes, filled in place, or refused by name."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import ckpt
from ckpt.errors import LeafMismatch, LeafNotFound, UnsupportedLeaf

pytestmark = pytest.mark.essential

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "complex64", "complex128", "int4", "uint4",
]  # fmt: skip


def _array(dtype: str, shape: tuple[int, ...] = (3, 5)) -> np.ndarray[Any, Any]:
    values = np.arange(int(np.prod(shape))).reshape(shape) % 7
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def _equal(value: Any, array: np.ndarray[Any, Any]) -> bool:
    found = np.asarray(value)
    return found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_and_variables_of_each_dtype_return_with_the_same_bytes(dtype: str, tmp_path: Path) -> None:
    array = _array(dtype)
    ckpt.save({"tensor": tf.constant(array), "variable": tf.Variable(array)}, tmp_path, 1)

    made = ckpt.load(tmp_path)
    assert isinstance(made["tensor"], tf.Tensor)
    assert isinstance(made["variable"], tf.Variable)
    variable = tf.Variable(np.zeros_like(array))
    like = ckpt.load(tmp_path, like={"tensor": tf.constant(np.zeros_like(array)), "variable": variable})
    assert like["variable"] is variable
    for value in (*made.values(), *like.values()):
        assert _equal(value, array)


def test_scalars_and_empty_arrays_keep_their_shapes(tmp_path: Path) -> None:
    ckpt.save({"one": tf.Variable(3.0), "none": tf.zeros((0, 4)), "step": tf.constant(7, tf.int64)}, tmp_path, 1)
    one = tf.Variable(0.0)
    found = ckpt.load(tmp_path, like={"one": one, "none": tf.zeros((0, 4)), "step": tf.constant(0, tf.int64)})
    assert one.numpy() == 3.0
    assert found["none"].shape == (0, 4)
    assert found["step"].numpy() == 7


def test_a_trainable_variable_and_a_frozen_one_are_made_as_such(tmp_path: Path) -> None:
    ckpt.save({"w": tf.Variable(1.0), "f": tf.Variable(2.0, trainable=False)}, tmp_path, 1)
    found = ckpt.load(tmp_path)
    assert found["w"].trainable
    assert not found["f"].trainable


def test_a_variable_saved_twice_is_one_array(tmp_path: Path) -> None:
    variable = tf.Variable(np.arange(100.0))
    ckpt.save({"a": variable, "b": variable}, tmp_path, 1)
    found = ckpt.load(tmp_path)
    assert found["a"] is found["b"]


def _assign(variable: tf.Variable) -> None:
    variable.assign_add(tf.ones_like(variable))


def _scatter(variable: tf.Variable) -> None:
    variable.scatter_nd_update([[i] for i in range(100)], [99.0] * 100)


@tf.function
def _graph(variable: tf.Variable) -> None:
    variable.assign(variable * 3 + 1)


@tf.function(jit_compile=True)
def _xla(variable: tf.Variable) -> None:
    variable.assign(variable * 3 + 1)


@pytest.mark.parametrize("change", [_assign, _scatter, _graph, _xla])
def test_a_change_during_a_save_is_not_in_the_step(change: Callable[[tf.Variable], None], tmp_path: Path) -> None:
    array = np.arange(500_000, dtype=np.float32)
    variable = tf.Variable(array)
    change(tf.Variable(array))  # traced before the save
    with ckpt.Checkpointer(tmp_path, every=None) as saver:
        for step in range(1, 4):
            variable.assign(array + step)
            handle = saver.save(step, {"v": variable})
            change(variable)
            handle.result()
    for step in range(1, 4):
        assert _equal(ckpt.load(tmp_path, step=step)["v"], array + step)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: tf.constant("text"), "leaf bad: a tensor of strings has no plain bytes"),
        (lambda: tf.Variable("text"), "leaf bad: a tensor of strings has no plain bytes"),
        (lambda: tf.ragged.constant([[1], [2, 3]]), "leaf bad: a RaggedTensor .*flat_values"),
        (lambda: tf.sparse.from_dense([[1, 0]]), "leaf bad: a SparseTensor .*indices, values and dense_shape"),
        (lambda: tf.IndexedSlices(tf.ones(1), tf.constant([0])), "leaf bad: IndexedSlices .*indices, values"),
        (lambda: tf.quantization.quantize([1.0], 0.0, 2.0, tf.qint8)[0], "leaf bad: a quantized tensor .qint8"),
        (lambda: tf.Variable(1.0).handle, "leaf bad: a resource tensor refers to an object"),
        (lambda: tf.data.Dataset.range(3), "leaf bad: a tf.data.Dataset has no position.*iter"),
        (lambda: tf.compat.v1.train.AdamOptimizer(), "leaf bad: the slots of a AdamOptimizer .*variables()"),
    ],
)
def test_what_has_no_plain_bytes_is_refused_by_name(value: Callable[[], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeaf, match=message):
        ckpt.save({"bad": value()}, tmp_path, 1)


def test_a_symbolic_tensor_is_refused_by_name(tmp_path: Path) -> None:
    @tf.function
    def traced(x: tf.Tensor) -> tf.Tensor:
        with pytest.raises(UnsupportedLeaf, match="leaf x: a symbolic tensor has no data: save outside of tf.function"):
            ckpt.save({"x": x}, tmp_path, 1)
        return x

    traced(tf.constant(1.0))


class Model(tf.Module):
    """Variables in attributes, lists and dicts, one of them twice, a generator and a plain number."""

    def __init__(self, value: float, width: int = 3) -> None:
        super().__init__()
        self.w = tf.Variable(tf.fill((width,), value))
        self.again = self.w
        self.blocks = [tf.Variable(value + 1), {"deep": tf.Variable(value + 2)}]
        self.generator = tf.random.Generator.from_seed(int(value))
        self.myself = self
        self.number = 5


def test_a_module_is_filled_in_place_by_the_names_of_its_attributes(tmp_path: Path) -> None:
    saved = Model(1.0)
    saved.generator.normal((3,))
    ckpt.save({"model": saved}, tmp_path, 1)
    want = saved.generator.normal((3,)).numpy()
    names = set(ckpt.open(tmp_path)[1])
    assert names == {"model.w", "model.blocks.0", "model.blocks.1.deep", "model.generator.state"}

    fresh = Model(9.0)
    w = fresh.w
    ckpt.load(tmp_path, like={"model": fresh})
    assert fresh.w is w
    assert [w.numpy().tolist(), fresh.blocks[0].numpy(), fresh.blocks[1]["deep"].numpy()] == [[1.0] * 3, 2.0, 3.0]
    assert fresh.generator.normal((3,)).numpy().tolist() == want.tolist()


def test_a_checkpoint_object_is_taken_as_it_is(tmp_path: Path) -> None:
    ckpt.save({"all": tf.train.Checkpoint(model=Model(1.0), step=tf.Variable(7))}, tmp_path, 1)
    step, model = tf.Variable(0), Model(2.0)
    ckpt.load(tmp_path, like={"all": tf.train.Checkpoint(model=model, step=step)})
    assert step.numpy() == 7
    assert model.w.numpy().tolist() == [1.0] * 3


def test_a_module_of_another_structure_is_refused_before_it_is_filled(tmp_path: Path) -> None:
    ckpt.save({"model": Model(1.0)}, tmp_path, 1)
    wider = Model(5.0, width=4)
    with pytest.raises(LeafMismatch, match=r"leaf model.w: .* shape \[3\], `like` has \[4\]"):
        ckpt.load(tmp_path, like={"model": wider})
    more = Model(5.0)
    more.extra = tf.Variable(1.0)
    with pytest.raises(LeafMismatch, match="leaf model of `like` .*lacks extra, unlike the Model"):
        ckpt.load(tmp_path, like={"model": more})
    less = Model(5.0)
    del less.blocks
    with pytest.raises(LeafMismatch, match="leaf model of `like` .*also has blocks, unlike the Model"):
        ckpt.load(tmp_path, like={"model": less})
    for model in (wider, more, less):
        assert set(model.w.numpy().tolist()) == {5.0}


def test_another_dtype_and_a_missing_key_are_refused(tmp_path: Path) -> None:
    ckpt.save({"v": tf.Variable(1.0)}, tmp_path, 1)
    with pytest.raises(LeafMismatch, match="leaf v: .* dtype float32, `like` has bfloat16"):
        ckpt.load(tmp_path, like={"v": tf.Variable(1.0, dtype=tf.bfloat16)})
    with pytest.raises(LeafNotFound, match="leaf other"):
        ckpt.load(tmp_path, like={"other": tf.Variable(1.0)})


def _dataset() -> tf.data.Dataset:
    return tf.data.Dataset.range(1000).shuffle(64, seed=3).map(lambda x: x * 2).batch(4)


def test_an_iterator_continues_where_it_was_saved(tmp_path: Path) -> None:
    iterator = iter(_dataset())
    for _ in range(7):
        next(iterator)
    ckpt.save({"data": iterator}, tmp_path, 1)
    want = [batch.numpy().tolist() for batch in iterator]

    fresh = iter(_dataset())
    next(fresh)
    assert ckpt.load(tmp_path, like={"data": fresh})["data"] is fresh
    assert [batch.numpy().tolist() for batch in fresh] == want


def test_a_numpy_iterator_continues_where_it_was_saved(tmp_path: Path) -> None:
    iterator = _dataset().as_numpy_iterator()
    for _ in range(3):
        next(iterator)
    ckpt.save({"data": iterator}, tmp_path, 1)
    want = [batch.tolist() for batch in iterator]
    fresh = _dataset().as_numpy_iterator()
    ckpt.load(tmp_path, like={"data": fresh})
    assert [batch.tolist() for batch in fresh] == want


def test_an_iterator_with_python_functions_is_refused_with_what_to_do(tmp_path: Path) -> None:
    dataset = tf.data.Dataset.range(10).map(lambda x: tf.py_function(lambda y: y, [x], tf.int64))
    with pytest.raises(UnsupportedLeaf, match="leaf data: .*has a state of its own .*leave out py_function"):
        ckpt.save({"data": iter(dataset)}, tmp_path, 1)


def test_a_lookup_table_of_strings_is_restored(tmp_path: Path) -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    table.insert(["a", "b"], [1, 2])
    ckpt.save({"table": table}, tmp_path, 1)
    fresh = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    ckpt.load(tmp_path, like={"table": fresh})
    assert fresh.lookup(tf.constant(["a", "b", "c"])).numpy().tolist() == [1, 2, -1]


def test_a_generator_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    ckpt.save({"g": tf.random.Generator.from_seed(1, alg="philox")}, tmp_path, 1)
    with pytest.raises(LeafMismatch, match="leaf g"):
        ckpt.load(tmp_path, like={"g": tf.random.Generator.from_seed(1, alg="threefry")})


def test_global_generators_continue(tmp_path: Path) -> None:
    tf.random.set_seed(11)
    tf.random.normal((2,))
    tf.random.get_global_generator().normal((2,))
    ckpt.save({"random": ckpt.RandomState()}, tmp_path, 1)
    want = [tf.random.normal((2,)).numpy().tolist(), tf.random.get_global_generator().normal((2,)).numpy().tolist()]
    tf.random.set_seed(5)
    ckpt.load(tmp_path, like={"random": ckpt.RandomState()})
    assert [tf.random.normal((2,)).numpy().tolist(), tf.random.get_global_generator().normal((2,)).numpy().tolist()] == want


def test_a_tensor_of_another_framework_takes_the_bytes(tmp_path: Path) -> None:
    ckpt.save({"v": tf.Variable([1.0, 2.0])}, tmp_path, 1)
    array = np.zeros(2, np.float32)
    ckpt.load(tmp_path, like={"v": array})
    assert array.tolist() == [1.0, 2.0]


def test_variables_of_a_mirrored_strategy_are_stored_once(tmp_path: Path) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    ckpt.save({"v": variable}, tmp_path, 1)
    variable.assign([0.0, 0.0])
    ckpt.load(tmp_path, like={"v": variable})
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_random_generators_of_an_imported_tensorflow_start_nothing() -> None:
    """TensorFlow takes the memory of all GPUs when its context starts, which a process that only imports it must not do."""
    code = (
        "import ckpt, tensorflow; ckpt.RandomState().load_state_dict(ckpt.RandomState().state_dict()); "
        "from tensorflow.python.eager import context; print(context.context()._initialized)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
