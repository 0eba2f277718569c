"""Leaves of Keras 3 variables on every backend, and the state of models, layers, optimizers, metrics and seed generators.

Names follow the attributes of the objects (`layers.dense.kernel`, `optimizer.layers.dense.kernel.momentum`), as in Keras' own
weight files. The automatic names of Keras, such as `dense_7`, count all layers of the process and so differ between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.utils.naming import to_snake_case

from ckpt.state import leaves
from ckpt.state.boxes import Box
from ckpt.state.leaves.base import ArrayLeaf, Bytes, LeafShard, MemoryLayout, StridedElements
from ckpt.state.named_state import require_saved_names
from ckpt.state.stateful import Stateful

_GLOBAL_SEED_GENERATOR = "global_seed_generator"


def _first_variable_class() -> type:
    """Return the class that the variables of all backends derive from."""
    of_keras: list[type] = [kind for kind in keras.Variable.__mro__ if kind.__module__.startswith("keras.src.backend")]
    return of_keras[-1]


_Variable = _first_variable_class()


def is_array(kind: type) -> bool:
    """Return whether values of this type are variables, or stand for tensors in a functional model."""
    return issubclass(kind, (_Variable, keras.KerasTensor))


def as_leaf(value: Any) -> ArrayLeaf:
    """Return the leaf of a variable; raise TypeError for one without data."""
    if isinstance(value, keras.KerasTensor):
        raise TypeError("a KerasTensor has no data: store the model")
    inner = leaves.as_leaf(value.value)
    if inner is None:
        raise TypeError(
            f"a Keras variable on the backend {keras.backend.backend()} is not supported: use tensorflow, torch or jax"
        )
    return inner if inner.kind == "torch" else _VariableLeaf(value, inner)  # a torch tensor is filled in place


def empty_leaf(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Raise TypeError: a step names the framework of a backend, never keras."""
    raise TypeError("the array was saved as a variable of keras without a backend: give `like` with arrays")


class _VariableLeaf(ArrayLeaf):
    """A Keras variable, with the leaf of the array that its backend has. A load assigns a new array to it."""

    __slots__ = ("_inner", "kind")

    kind: str  # type: ignore[misc]

    def __init__(self, variable: Any, inner: ArrayLeaf) -> None:
        self.value = variable
        self._inner = inner
        self.kind, self.dtype, self.shape = inner.kind, inner.dtype, inner.shape
        self.itemsize, self.nbytes, self.flat = inner.itemsize, inner.nbytes, inner.flat

    def read(self, box: Box, out: Bytes) -> None:
        self._inner.read(box, out)

    def write(self, box: Box, data: Bytes) -> None:
        self._inner.write(box, data)

    @classmethod
    def read_elements(cls, leaves: Sequence[tuple[Self, StridedElements]]) -> list[bytes]:
        return [type(leaf._inner).read_elements([(leaf._inner, elements)])[0] for leaf, elements in leaves]

    def identity(self) -> Hashable | None:
        return self._inner.identity()

    def address(self) -> int | None:
        return self._inner.address()

    def memory_layout(self) -> MemoryLayout | None:
        return self._inner.memory_layout()

    def attributes(self) -> Mapping[str, str | bool]:
        return self._inner.attributes()

    def version(self) -> int | None:
        return self._inner.version()

    def is_immutable(self) -> bool:
        return self._inner.is_immutable()

    def cuda_device(self) -> Any:
        return self._inner.cuda_device()

    def shards(self) -> list[LeafShard] | None:
        return self._inner.shards()

    def target(self) -> ArrayLeaf:
        target = self._inner.target()
        return self if target is self._inner else _VariableLeaf(self.value, target)

    def finish(self) -> Any:
        made = self._inner.finish()
        if made is not self.value.value:
            self.value.assign(made)
        return self.value


# --- objects -----------------------------------------------------------------------------------------------------


def as_stateful(value: object) -> Stateful | None:
    """Return the functions that read and set the state of a model, layer, optimizer, metric or seed generator."""
    if isinstance(value, keras.random.SeedGenerator):
        return _seed_stateful(value)
    if isinstance(value, keras.optimizers.Optimizer):
        return _named(value, lambda: optimizer_state(value, value), lambda saved: _build_optimizer_like(value, saved))
    if isinstance(value, keras.Metric):
        return _named(value, lambda: own_variables(value, value.variables))
    if isinstance(value, keras.Layer):
        return _layer_stateful(value)
    return None


def _seed_stateful(generator: Any) -> Stateful:
    """Return the functions of a seed generator; the integers of its state have another type on each backend."""

    def put(state: dict[str, Any]) -> None:
        generator.state.assign(np.asarray(state["state"]).astype(generator.state.dtype))

    return Stateful(lambda: {"state": np.array(keras.ops.convert_to_numpy(generator.state)).astype(np.int64)}, put)


def is_random_generator(value: object) -> bool:
    """Return whether `value` is a seed generator, so that each rank of a group stores its own."""
    return isinstance(value, keras.random.SeedGenerator)


def random_state() -> dict[str, Any] | None:
    """Return the state of the global seed generator, None where nothing has used it."""
    generator = global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)
    return None if generator is None else {"state": np.asarray(keras.ops.convert_to_numpy(generator.state))}


def set_random_state(state: dict[str, Any] | None) -> None:
    """Set the global seed generator."""
    if state is None:
        return
    generator = global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)
    if generator is None:
        generator = keras.random.SeedGenerator(0)
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)
    generator.state.assign(state["state"])


def _named(value: object, get: Callable[[], dict[str, Any]], prepare: Callable[[Any], None] = lambda _: None) -> Stateful:
    """Return the functions of an object whose variables are filled in place, if their names are those of the step."""

    def like(saved: Any, everything: bool) -> dict[str, Any]:
        prepare(saved)
        state = get()
        if everything:
            require_saved_names(state, saved, type(value).__name__)
        return state

    return Stateful(get, lambda _: None, like)


def _layer_stateful(layer: Any) -> Stateful:
    """Return the functions of a layer or model; the state of a compiled model includes that of its optimizers."""
    optimizer = getattr(layer, "optimizer", None)
    others = dict(_other_optimizers(layer, (), {id(optimizer)}))

    def get() -> dict[str, Any]:
        if callable(sync := getattr(layer, "jax_state_sync", None)):
            sync()  # during fit, the arrays are not in the variables
        state = _whole_state(layer)
        if optimizer is not None:
            state["optimizer"] = optimizer_state(optimizer, layer)
        if others:
            state["optimizers"] = {name: optimizer_state(other, layer) for name, other in others.items()}
        return state

    def like(saved: Any, everything: bool) -> dict[str, Any]:
        if not layer.built:
            raise TypeError(f"the {type(layer).__name__} has no variables yet: build it, or call it once, before the load")
        saved_optimizer = saved.get("optimizer") if isinstance(saved, dict) else None
        if optimizer is not None and saved_optimizer is not None and not optimizer.built:
            optimizer.build(layer.trainable_variables)
        for name, other in others.items():
            _build_for_saved_parameters(other, layer, saved.get("optimizers", {}).get(name))
        state = get()
        if everything:
            unused = {"optimizer"} if optimizer is None else set()
            unused |= set() if others else {"optimizers"}
            require_saved_names(state, {k: v for k, v in saved.items() if k not in unused}, type(layer).__name__)
        return state

    return Stateful(get, lambda _: _finalize(layer), like)


def _finalize(layer: Any) -> None:
    """Let layers such as Normalization compute what they derive from their variables."""
    for part in layer._flatten_layers():
        if callable(finalize := getattr(part, "finalize_state", None)):
            finalize()


def _whole_state(layer: Any) -> dict[str, Any]:
    """Return the state of a layer, with all of its variables."""
    state = layer_state(layer, {})
    known = {key for key, _ in _parameter_names(state, ())}
    others = [v for v in layer.variables if id(v) not in known]
    if others:  # variables of objects that are not an attribute of any layer
        _add(state, "others", {str(i): variable for i, variable in enumerate(others)})
    return state


def layer_state(layer: Any, visited: dict[int, object]) -> dict[str, Any]:
    """Return the variables, seed generators and sublayers of a layer in nested dicts.

    visited: the layers that have an entry already, by id. A shared layer has one entry.
    """
    visited[id(layer)] = layer
    state = own_variables(layer, [*layer._trainable_variables, *layer._non_trainable_variables])
    for name, child in _attributes(layer):
        entry = _entry(child, visited)
        if entry:
            _add(state, name, entry)
    return state


def _entry(value: object, visited: dict[int, object]) -> Any:
    """Return the state of a sublayer, of a container of them, or a seed generator; None for other values."""
    if id(value) in visited:
        return None
    if isinstance(value, keras.Layer):
        return layer_state(value, visited)
    if isinstance(value, keras.random.SeedGenerator):
        visited[id(value)] = value
        return value
    if isinstance(value, (list, tuple, dict)):
        visited[id(value)] = value
        return _container_state(value, visited)
    return value if _is_torch_module(value) else None


def _container_state(container: list[Any] | tuple[Any, ...] | dict[Any, Any], visited: dict[int, object]) -> dict[str, Any]:
    """Return the states in a list by the names of the classes and their count, in a dict by its keys."""
    state: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    pairs: Iterable[tuple[str | None, Any]] = [(None, item) for item in container]
    if isinstance(container, dict):
        pairs = [(str(key), item) for key, item in container.items()]
    for name, item in pairs:
        kind = to_snake_case(type(item).__name__)
        number = numbers.get(kind, 0)
        entry = _entry(item, visited)
        if isinstance(item, (keras.Layer, keras.random.SeedGenerator, list, tuple, dict)):
            numbers[kind] = number + 1
        if entry:
            _add(state, name or (f"{kind}_{number}" if number else kind), entry)
    return state


def _attributes(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a layer in which others may be: its list of layers, public ones, then private ones, sorted."""
    if isinstance(layer, keras.Model) and isinstance(layer, (keras.Sequential, keras.src.models.Functional)):
        yield "layers", layer.layers
    found = dict(vars(layer))
    found.update(found.pop("_modules", None) or {})  # torch keeps modules there
    for name in sorted(found, key=lambda name: (name.startswith("_"), name)):
        if name not in _SKIPPED:
            yield name, found[name]


_SKIPPED = {
    "_parameters", "_buffers", "_torch_params", "_functional", "_inbound_nodes", "_outbound_nodes", "_tracker", "_metrics",
    "_losses", "_operations", "_operations_by_depth", "_nodes", "_nodes_by_depth", "_seed_generators", "_trainable_variables",
    "_non_trainable_variables", "_optimizer", "optimizer", "_loss_tracker", "_compile_metrics", "_compile_loss",
    "_compile_config", "_jax_state",
}  # fmt: skip
"""Attributes of Keras that list what other attributes have, or that belong to the compiled model."""


def _is_torch_module(value: object) -> bool:
    return keras.backend.backend() == "torch" and hasattr(value, "named_buffers") and hasattr(value, "state_dict")


def own_variables(owner: object, variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by the attributes of their owner that have them, or else by their index in the list."""
    names = _names_of_attributes(owner)
    state: dict[str, Any] = {}
    for i, variable in enumerate(variables):
        _add(state, names.get(id(variable), f"variable_{i}"), variable)
    return state


def _names_of_attributes(owner: object) -> dict[int, str]:
    """Return the names of the attributes that are variables, by the id of the variable."""
    return {id(value): name.lstrip("_") for name, value in sorted(vars(owner).items()) if isinstance(value, _Variable)}


def _add(state: dict[str, Any], name: str, value: object) -> None:
    while name in state:
        name += "_"
    state[name] = value


# --- optimizers --------------------------------------------------------------------------------------------------


def _other_optimizers(value: object, path: tuple[str, ...], visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers in attributes of a model and of its layers, which its own training step uses, by their names.

    visited: the ids of objects that were visited and are skipped; this function adds to them.
    """
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, keras.optimizers.Optimizer):
        yield "_".join(path), value
    elif isinstance(value, keras.Layer):
        for name, child in [*_attributes(value), ("optimizer", getattr(value, "optimizer", None))]:
            yield from _other_optimizers(child, (*path, name), visited)
    elif isinstance(value, (list, tuple, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in pairs:
            yield from _other_optimizers(child, (*path, str(key)), visited)


def _build_for_saved_parameters(optimizer: Any, layer: Any, saved: object) -> None:
    """Make the variables of an optimizer that has made no step yet, for the parameters that it had when it was saved."""
    if optimizer.built or not isinstance(saved, dict):
        return

    def is_saved(keys: tuple[str, ...]) -> bool:
        part: Any = saved
        for key in keys:
            part = part.get(key) if isinstance(part, dict) else None
        return part is not None

    names = dict(_parameter_names(_whole_state(layer), ()))
    parameters = [p for p in layer.trainable_variables if id(p) in names and is_saved(names[id(p)])]
    if parameters:
        optimizer.build(parameters)


def optimizer_state(optimizer: Any, owner: Any) -> dict[str, Any]:
    """Return the variables of an optimizer; those that belong to a parameter are below the name of the parameter.

    owner: the model that names the parameters. The optimizer itself numbers them, as `parameters.0`.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    parameters = list(getattr(inner, "_trainable_variables", None) or [])
    names = {} if owner is optimizer else dict(_parameter_names(_whole_state(owner), ()))
    paths = sorted(
        ((p.path.replace("/", "_") + "_", names.get(id(p), ("parameters", str(i)))) for i, p in enumerate(parameters)),
        key=lambda pair: len(pair[0]), reverse=True,
    )  # fmt: skip
    own = {
        id(v): n.lstrip("_") for part in (inner, optimizer) for n, v in sorted(vars(part).items()) if isinstance(v, _Variable)
    }
    state: dict[str, Any] = {}
    for i, variable in enumerate(optimizer.variables):
        of_parameter = next(((prefix, keys) for prefix, keys in paths if variable.name.startswith(prefix)), None)
        if id(variable) in own:
            _add(state, own[id(variable)], variable)
        elif of_parameter is None:
            _add(state, f"variable_{i}", variable)
        else:
            prefix, keys = of_parameter
            parameter_state = state
            for key in keys:
                parameter_state = parameter_state.setdefault(key, {})
            _add(parameter_state, variable.name.removeprefix(prefix), variable)
    return state


def _parameter_names(state: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the id and the keys of each variable in the state of a layer."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _parameter_names(value, (*path, key))
        elif isinstance(value, _Variable):
            yield id(value), (*path, key)
        elif isinstance(value, keras.random.SeedGenerator):
            yield id(value.state), (*path, key)


def _build_optimizer_like(optimizer: Any, saved: Any) -> None:
    if not optimizer.built and isinstance(saved, dict) and "parameters" in saved:
        raise TypeError("the optimizer has no variables yet: call its build(model.trainable_variables) before the load")
