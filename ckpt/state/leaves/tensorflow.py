"""Leaves of tensorflow tensors and variables, and the state of its objects.

A variable is filled in place by `assign`; a tensor is immutable, so a load makes a new one. A save references the buffer that
a variable has at that time: tensorflow copies a buffer before it changes one that something else references.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable.base import Trackable

from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.frameworks import framework_file
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.numpy import NumpyLeaf
from ckpt.state.leaves.tensorflow_distributed import (
    DTensorLeaf,
    assign_to_replicas,
    layout_of,
    replicas_of,
    require_aggregation,
)
from ckpt.state.named_state import require_saved_names
from ckpt.state.stateful import Stateful
from ckpt.storage.base.errors import first_line

_COMPOSITES = {
    tf.RaggedTensor: "a RaggedTensor consists of several tensors: store its flat_values and nested_row_splits",
    tf.SparseTensor: "a SparseTensor consists of several tensors: store its indices, values and dense_shape",
    tf.IndexedSlices: "IndexedSlices consist of several tensors: store their indices, values and dense_shape",
}


def is_array(kind: type) -> bool:
    """Return whether values of this type are tensors or variables, or consist of tensors."""
    return issubclass(kind, (tf.Tensor, tf.Variable, *_COMPOSITES))


def as_leaf(value: Any) -> ArrayLeaf:
    """Return the leaf of a tensor or variable; raise TypeError for one without plain bytes."""
    for kind, message in _COMPOSITES.items():
        if isinstance(value, kind):
            raise TypeError(message)
    _require_plain_dtype(value.dtype)
    require_aggregation(value)
    layout = layout_of(value)
    return TensorLeaf(value) if layout is None else DTensorLeaf(value, layout)


def empty_leaf(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Return the target of a new tensor; attributes: variable (make a variable), frozen (a variable that is not trained)."""
    return _NewTensor(dtype, shape, None, attributes)


def _require_plain_dtype(dtype: tf.DType) -> None:
    if dtype == tf.string:
        raise TypeError("a tensor of strings has no plain bytes: store it as a list of str, or encode it as numbers")
    if dtype in (tf.resource, tf.variant):
        raise TypeError(f"a {dtype.name} tensor refers to an object of this process: store the object, or its numbers")
    if dtype.is_quantized:
        raise TypeError(f"a quantized tensor ({dtype.name}) needs a scale: store its integers (tf.bitcast) and the scale")


def _host_array(value: Any) -> np.ndarray[Any, Any]:
    """Return the elements of a tensor or variable, on the host without a copy; raise TypeError for a tensor without data."""
    tensor = value.read_value() if isinstance(value, tf.Variable) else value
    if not tf.is_tensor(tensor) or not hasattr(tensor, "numpy"):
        raise TypeError("a symbolic tensor has no data: save outside of tf.function")
    read = getattr(tensor, "_numpy", tensor.numpy)  # `numpy` copies the memory that `_numpy` shares
    return np.asarray(read())


class TensorLeaf(NumpyLeaf):
    """A tensor, or a variable with the elements that it has now."""

    kind = "tensorflow"
    can_alias = False

    __slots__ = ()

    def __init__(self, value: Any) -> None:
        super().__init__(_host_array(value))
        self.value = value

    def identity(self) -> tuple[str, int]:
        return ("tensorflow", id(self.value))

    def attributes(self) -> Mapping[str, str | bool]:
        if not isinstance(self.value, tf.Variable):
            return {}
        return {"variable": True} if self.value.trainable else {"variable": True, "frozen": True}

    def is_immutable(self) -> bool:
        return True  # the numpy array references the buffer, so tensorflow changes a copy of it

    def target(self) -> ArrayLeaf:
        if isinstance(self.value, tf.Variable):
            return VariableTarget(self.value, self.dtype, self.shape)
        return _NewTensor(self.dtype, self.shape, self.value.device, {})


class VariableTarget(NumpyLeaf):
    """Bytes on the host that `finish` assigns to a variable after a load has filled them."""

    kind = "tensorflow"

    __slots__ = ("_variable",)

    def __init__(self, variable: Any, dtype: str, shape: tuple[int, ...]) -> None:
        """variable: any object with `assign`, which `finish` returns."""
        super().__init__(np.empty(shape, numpy_dtype(dtype)))
        self._variable = variable

    def finish(self) -> Any:
        if replicas_of(self._variable):
            assign_to_replicas(self._variable, self.value)
        else:
            self._variable.assign(self.value)
        return self._variable


class _NewTensor(NumpyLeaf):
    """Bytes on the host from which `finish` makes a tensor or a variable after a load has filled them."""

    kind = "tensorflow"

    __slots__ = ("_attributes", "_device")

    def __init__(self, dtype: str, shape: tuple[int, ...], device: str | None, attributes: dict[str, Any]) -> None:
        super().__init__(np.empty(shape, numpy_dtype(dtype)))
        self._device = device
        self._attributes = attributes

    def attributes(self) -> Mapping[str, str | bool]:
        return {}

    def finish(self) -> Any:
        with tf.device(self._device):
            if self._attributes.get("variable"):
                return tf.Variable(self.value, trainable=not self._attributes.get("frozen"))
            return tf.constant(self.value)


# --- objects -----------------------------------------------------------------------------------------------------


def as_stateful(value: object) -> Stateful | None:
    """Return the functions that read and set the state of a trackable: its variables, named by attributes as in a checkpoint.

    The objects are tf.Module, tf.train.Checkpoint, tf.random.Generator, iterators of tf.data and lookup tables.

    Raises TypeError for objects whose state cannot be reached.
    """
    if isinstance(value, tf.random.Generator):
        return _generator_state(value)
    if isinstance(value, tf.distribute.DistributedIterator):
        raise TypeError("an iterator over replicas has no position: store the number of batches and skip() them in the dataset")
    if not isinstance(value, Trackable):
        return None
    if isinstance(value, tf.data.Dataset):
        raise TypeError("a tf.data.Dataset has no position: make an iterator with iter(), and store that")
    if hasattr(value, "get_slot_names") and not hasattr(value, "build"):
        raise TypeError(f"the slots of a {type(value).__name__} of tf.compat.v1 have no names: store its variables()")
    if _has_own_tensors(value):
        return Stateful(lambda: _own_bytes(value), lambda state: _set_own_bytes(value, state))

    def like(saved: object, everything: bool) -> dict[str, Any]:
        state = _children(value, set())
        if everything:
            require_saved_names(state, saved, type(value).__name__)
        return state

    return Stateful(lambda: _children(value, set()), lambda _: None, like)  # the variables are filled in place


def is_random_generator(value: object) -> bool:
    """Return whether `value` is a generator, so that each rank of a group stores its own."""
    return isinstance(value, tf.random.Generator)


def _generator_state(generator: Any) -> Stateful:
    def get() -> dict[str, Any]:
        state = {"algorithm": int(generator.algorithm), "state": np.asarray(generator.state)}
        counters = [np.asarray(replica) for replica in getattr(generator.state, "values", ())]
        if any((counter != state["state"]).any() for counter in counters):  # replicas that have drawn arrays of other shapes
            state["replicas"] = counters
        return state

    def put(state: dict[str, Any]) -> None:
        if state["algorithm"] != int(generator.algorithm):
            raise ValueError(f"it uses algorithm {int(generator.algorithm)}, the saved one {state['algorithm']}")
        generator.state.assign(state["state"])
        replicas, counters = getattr(generator.state, "values", ()), state.get("replicas", ())
        if len(replicas) == len(counters):
            for replica, counter in zip(replicas, counters, strict=True):
                replica.assign(counter)

    return Stateful(get, put)


def _children(value: Any, visited: set[int]) -> dict[str, Any]:
    """Return the variables below a trackable in nested dicts; an object that appears twice is entered once."""
    visited.add(id(value))
    found: dict[str, Any] = {}
    for name, child in tf.train.TrackableView.children(value).items():
        if isinstance(child, tf.Variable):
            found[name] = child
        elif id(child) not in visited:
            entry = _child_entry(child, visited)
            if entry is not None:
                found[name] = entry
    return found


def _child_entry(child: Any, visited: set[int]) -> Any:
    """Return the entry of a trackable: itself where it has functions of its own for its state; None if it has no state."""
    of_tensorflow = framework_file(type(child)) is framework_file(tf.Module)
    if not of_tensorflow or isinstance(child, tf.random.Generator) or _has_own_tensors(child):
        visited.add(id(child))
        return child
    if isinstance(child, tf.data.Dataset) or not isinstance(child, Trackable):
        return None
    as_stateful(child)  # refuses what has no names
    return _children(child, visited) or None


def _has_own_tensors(value: object) -> bool:
    """Return whether a trackable turns its state into tensors itself, as iterators and lookup tables do."""
    method = getattr(type(value), "_serialize_to_tensors", None)
    return method is not None and method is not Trackable._serialize_to_tensors and not isinstance(value, tf.Variable)


def _own_bytes(value: Any) -> dict[str, bytes]:
    """Return the tensors of a trackable's own state, each as the bytes of a TensorProto."""
    try:
        return {name: tf.io.serialize_tensor(tensor).numpy() for name, tensor in value._serialize_to_tensors().items()}
    except tf.errors.FailedPreconditionError as error:
        message = (
            f"a function of the dataset has a state of its own ({first_line(error)}): leave out py_function and random ops, or "
            "store the number of batches and skip() them"
        )
        raise TypeError(message) from error


def _set_own_bytes(value: Any, state: dict[str, bytes]) -> None:
    current = value._serialize_to_tensors()
    if state.keys() != current.keys():
        raise ValueError(f"it has the tensors {sorted(current)}, the saved one {sorted(state)}")
    value._restore_from_tensors({name: tf.io.parse_tensor(state[name], current[name].dtype) for name in current})


# --- the global generators ---------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Return the global seed, the generator of the seeds of eager random ops, and the global tf.random.Generator.

    What a kernel inside of a tf.function counts by itself cannot be read: use tf.random.Generator or stateless ops there.
    """
    context = _context()
    rng, made = getattr(context, "_rng", None), _global_generator_module().global_generator
    return {
        "seed": context._seed,
        "op_seeds": None if rng is None else rng.getstate(),
        "generator": None if made is None else _generator_state(made).get(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the global seed and generators; those that did not exist at the save stay as they are."""
    if state["seed"] is not None:
        tf.random.set_seed(state["seed"])
        if state["op_seeds"] is not None:
            version, words, gauss = state["op_seeds"]
            _context()._rng.setstate((version, tuple(words), gauss))
    if state["generator"] is not None:
        saved = state["generator"]
        generator = tf.random.get_global_generator()
        if saved["algorithm"] == int(generator.algorithm):
            _generator_state(generator).set(saved)
        else:
            tf.random.set_global_generator(tf.random.Generator.from_state(saved["state"], saved["algorithm"]))


def _context() -> Any:
    return importlib.import_module("tensorflow.python.eager.context").context()


def _global_generator_module() -> ModuleType:
    return importlib.import_module("tensorflow.python.ops.stateful_random_ops")
