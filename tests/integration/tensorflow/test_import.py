"""ckpt-import reads checkpoints of TensorFlow with the values that TensorFlow reads, without TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from helpers.imports import assert_killed_import_leaves_no_step, growth_of_memory, load_imported
from helpers.refusal import refused

import ckpt
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_leveldb import crc32c

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


class Model(tf.Module):
    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.w = tf.Variable(draw.standard_normal((300, 40)), dtype=tf.float32)
        self.parts = [tf.Variable(draw.standard_normal(4), dtype=tf.bfloat16), tf.Variable(True)]
        self.by_name = {"a/b": tf.Variable(draw.integers(0, 9, 3)), "c.d": tf.Variable(tf.zeros([0, 3]))}


def bytes_of(value: Any) -> bytes:
    return np.asarray(tf.convert_to_tensor(value)).tobytes()


def test_a_checkpoint_fills_the_objects_from_which_it_was_written(tmp_path: Path) -> None:
    model, step = Model(1), tf.Variable(7)
    prefix = tf.train.Checkpoint(model=model, step=step).save(str(tmp_path / "tf" / "ck"))
    for source in (prefix, f"{prefix}.index", tmp_path / "tf"):
        loaded = load_imported(source, to=tmp_path / "imported")
        assert set(loaded) == {"model", "step", "save_counter"}
        reader = tf.train.load_checkpoint(prefix)
        assert bytes_of(loaded["model"]["parts"]["0"]) == bytes_of(reader.get_tensor(f"model/parts/0{VALUE}"))
        assert bytes_of(loaded["model"]["by_name"]["a/b"]) == bytes_of(model.by_name["a/b"])
        assert loaded["model"]["by_name"]["c.d"].shape == (0, 3)
    other, other_step = Model(2), tf.Variable(0)
    target = tf.train.Checkpoint(model=other, step=other_step)
    target.save_counter  # noqa: B018  it is made at its first use
    ckpt.load(tmp_path / "imported", like=target)
    for mine, theirs in zip(other.variables, model.variables, strict=True):
        assert bytes_of(mine) == bytes_of(theirs)
    assert int(other_step) == 7


def test_all_types_and_strings(tmp_path: Path) -> None:
    names = [
        "float16",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "complex64",
        "bool",
    ]
    variables = {name: tf.Variable(tf.cast([1, 0, 3], name)) for name in names}
    text = {"one": tf.Variable("a long text"), "many": tf.Variable(["x", "", "yz" * 100])}
    tf.train.Checkpoint(v=variables_of(variables), s=variables_of(text)).write(str(tmp_path / "tf"))
    loaded = load_imported(tmp_path / "tf")
    for name in names:
        assert loaded["v"][name].dtype == variables[name].dtype
        assert bytes_of(loaded["v"][name]) == bytes_of(variables[name])
    assert loaded["s"] == {"one": b"a long text", "many": [b"x", b"", b"yz" * 100]}


def variables_of(variables: dict[str, Any]) -> Any:
    module = tf.Module()
    for name, variable in variables.items():
        setattr(module, name, variable)
    return module


def test_a_checkpoint_by_the_names_of_tensors(tmp_path: Path) -> None:
    """As TensorFlow 1 writes it; one name continues another."""
    values = {"dense/kernel": tf.ones([2, 3]), "dense/kernel/Adam": tf.zeros([2, 3]), "step": tf.constant(5, tf.int64)}
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "old"), tensor_names=list(values), shape_and_slices=[""] * 3, tensors=list(values.values())
    )
    loaded = load_imported(tmp_path / "old")
    assert {name: bytes_of(value) for name, value in loaded.items()} == {k: bytes_of(v) for k, v in values.items()}
    only = load_imported(tmp_path / "old", "--only", "step", "--under", "model")
    assert list(only["model"]) == ["step"]


def test_a_saved_model_and_many_tensors(tmp_path: Path) -> None:
    """An index of several blocks."""
    module = variables_of({f"v{i}": tf.Variable(tf.fill([3], float(i))) for i in range(500)})
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = load_imported(tmp_path / "saved")
    assert all(np.array_equal(loaded[f"v{i}"], [i] * 3) for i in range(500))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    iterator = iter(tf.data.Dataset.range(5))
    tf.train.Checkpoint(it=iterator, v=tf.Variable(3)).write(str(tmp_path / "tf"))
    with refused(CkptError, "ITERATOR_STATE", "--only"):
        load_imported(tmp_path / "tf")
    assert int(load_imported(tmp_path / "tf", "--only", "v")["v"]) == 3
    with refused(CkptError, "does not exist"):
        load_imported(tmp_path / "nothing")
    tf.raw_ops.SaveV2(prefix=str(tmp_path / "sliced"), tensor_names=["p"], shape_and_slices=["4 0,2"], tensors=[tf.ones([2])])
    with refused(CkptError, "p is a partitioned variable"):
        load_imported(tmp_path / "sliced")


def test_damage_is_found(tmp_path: Path) -> None:
    tf.train.Checkpoint(model=Model(1)).write(str(tmp_path / "tf"))
    index, data = tmp_path / "tf.index", tmp_path / "tf.data-00000-of-00001"
    whole, content = index.read_bytes(), data.read_bytes()
    for at in range(0, len(whole) - 48, 29):  # the footer has no checksum
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with refused(CkptError, "copy it again", "tf.index"):
            load_imported(tmp_path / "tf")
    for length in range(0, len(whole) - 1, 37):
        index.write_bytes(whole[:length])
        with refused(CkptError, "copy it again"):
            load_imported(tmp_path / "tf")
    index.write_bytes(whole)
    data.write_bytes(content[:1000])
    with refused(CkptError, "ends before", "copy it again"):
        load_imported(tmp_path / "tf")
    data.unlink()
    with refused(CkptError, "data-00000-of-00001, which is missing"):
        load_imported(tmp_path / "tf")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "checkpoint").write_text('model_checkpoint_path: "ck-9"\n')
    with refused(CkptError, "ck-9.index, which is missing"):
        load_imported(tmp_path / "folder")
    assert not (tmp_path / "imported").exists()
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the standard


def test_a_killed_import_leaves_no_step(tmp_path: Path) -> None:
    tf.train.Checkpoint(model=Model(1)).write(str(tmp_path / "tf"))
    assert_killed_import_leaves_no_step(tmp_path / "tf")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    """A small checkpoint first loads all modules; then 512 MB are imported with much less memory, and without TensorFlow."""
    small, big = tmp_path / "small", tmp_path / "big"
    for path, size in ((small, 1), (big, 1 << 27)):
        tf.train.Checkpoint(v=tf.Variable(tf.ones([size]))).write(str(path))
    assert growth_of_memory(small, big, tmp_path, absent="tensorflow") < 400 << 20
