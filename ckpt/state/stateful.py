"""Read and set the state of objects with `state_dict()` and `load_state_dict()`, and of random generators."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ckpt.errors import UnsupportedLeaf
from ckpt.state.frameworks import framework_function, imported_files, usable_torch
from ckpt.state.optimizer_load import load_optimizer_state, loads_by_parameter
from ckpt.state.static_values import is_function, is_plain
from ckpt.storage.base.errors import CkptError, first_line, is_transient


@dataclass(frozen=True, slots=True)
class Stateful:
    """Functions that return the state of an object and set it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    like: Callable[[Any, bool], dict[str, Any]] | None = None
    """Returns the state that a load fills; None to fill what `get` returns. Its arguments are the saved state, with an object
    with `dtype` and `shape` for each array, and whether a load fills all of it. It raises TypeError or ValueError if the saved
    state does not fit."""
    replaces: bool = False
    """Whether the object is immutable, so that `set` returns a new object."""


def get_attribute(value: object, name: str) -> Any:
    """Return an attribute of an object of any class, None if the object has none of that name.

    Any error counts as a missing attribute unless the class defines it: a dict whose entries are its attributes may raise
    KeyError. An error that may be temporary, such as MemoryError, is raised. Raises UnsupportedLeaf if the class defines the
    attribute and reading it fails.
    """
    try:
        return getattr(value, name, None)
    except Exception as error:
        if is_transient(error):
            raise
        if inspect.getattr_static(type(value), name, None) is None:
            return None
        raise UnsupportedLeaf(
            f"the {name} of a {_type_name(value)} cannot be read ({_describe_error(error)}): {_LEAVE_OUT_HINT}"
        ) from error


def method(value: object, name: str) -> Callable[..., Any] | None:
    """Return a method of an object; None if its class does not define it.

    An attribute of the object alone is not returned: it may be anything, as in a generator of flax.nnx.
    """
    return getattr(value, name) if hasattr(type(value), name) else None


def as_stateful(value: Any, path: str) -> Stateful | None:
    """Return the functions that read and set the state of `value`, None if it has no state.

    Raises UnsupportedLeaf if reading its `state_dict` attribute fails, or where its framework gives no access to the state.
    """
    if isinstance(value, type):
        return None
    if (found := _stateful_of_framework(value, path)) is not None:
        return found
    try:
        get, put = get_attribute(value, "state_dict"), get_attribute(value, "load_state_dict")
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"leaf {path or '(root)'}: {error}") from error.__cause__
    if callable(get) and callable(put):
        if loads_by_parameter(value):
            return Stateful(get, partial(load_optimizer_state, value, put))
        return Stateful(partial(_without_annealing, get), put) if _is_torch_scheduler(value) else Stateful(get, put)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # SystemRandom has no state
        return Stateful(value.getstate, lambda state: value.setstate(_nested_tuple(state)))
    if isinstance(value, np.random.Generator):
        return _bit_generator_state(value.bit_generator)
    if isinstance(value, np.random.BitGenerator):
        return _bit_generator_state(value)
    if isinstance(value, np.random.RandomState):
        return Stateful(lambda: value.get_state(legacy=False), value.set_state)
    if _is_torch_generator(value):
        return Stateful(value.get_state, value.set_state)
    return _as_pytree(value, path)


def _as_pytree(value: object, path: str) -> Stateful | None:
    """Return the functions for a value of a class that the user has registered with a framework."""
    if is_plain(value):
        return None
    for file in imported_files().values():
        try:
            found: Stateful | None = file.as_pytree(value) if hasattr(file, "as_pytree") else None
        except Exception as error:
            where = f"leaf {path or '(root)'}: flattening a {_type_name(value)}"
            raise UnsupportedLeaf(f"{where} failed ({_describe_error(error)}): {_LEAVE_OUT_HINT}") from error
        if found is not None:
            return found
    return None


def _stateful_of_framework(value: object, path: str) -> Stateful | None:
    of_framework = framework_function(value, "as_stateful")
    if of_framework is None:
        return None
    try:
        found: Stateful | None = of_framework(value)
    except TypeError as error:
        raise UnsupportedLeaf(f"leaf {path or '(root)'}: {error}") from error
    return found


def state_of(stateful: Stateful, value: object, path: str) -> Any:
    """Return the state of an object; raise UnsupportedLeaf with its path where the object's own code fails."""
    try:
        return stateful.get()
    except (CkptError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedLeaf(
            f"leaf {path or '(root)'}: state_dict() of a {_type_name(value)} failed ({_describe_error(error)}): "
            f"{_LEAVE_OUT_HINT}"
        ) from error


_LEAVE_OUT_HINT = "fix that, store its values as entries of the state, or leave it out"


def _type_name(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def is_random_generator(value: object) -> bool:
    """Return whether `value` is a random generator or a RandomState: each rank of a group stores its own."""
    of_numpy = (np.random.Generator, np.random.BitGenerator, np.random.RandomState)
    if isinstance(value, (RandomState, random.Random, *of_numpy)) or _is_torch_generator(value):
        return True
    of_framework = framework_function(value, "is_random_generator")
    return of_framework is not None and bool(of_framework(value))


def _is_torch_generator(value: object) -> bool:
    torch = usable_torch()
    return torch is not None and isinstance(value, torch.Generator)


def _is_torch_scheduler(value: object) -> bool:
    torch = usable_torch()
    return torch is not None and isinstance(value, torch.optim.lr_scheduler.LRScheduler)


def _without_annealing(get: Callable[[], Any]) -> Any:
    """Return the state of a scheduler without the function that older versions of SWALR have in it.

    The constructor sets it, and `load_state_dict` keeps attributes that are not in the state. An SWALR may be in another
    scheduler, such as a SequentialLR.
    """

    def without(state: Any) -> Any:
        if type(state) is dict:
            return {k: without(v) for k, v in state.items() if k != "anneal_func" or not is_function(v)}
        return [without(item) for item in state] if type(state) is list else state

    return without(get())


def _bit_generator_state(generator: np.random.BitGenerator) -> Stateful:
    def get() -> dict[str, Any]:
        sequence: Any = generator.seed_seq
        if not isinstance(sequence, np.random.SeedSequence):
            return dict(generator.state)
        return {**generator.state, _SEED_SEQUENCE: {name: _plain_numbers(value) for name, value in sequence.state.items()}}

    def put(state: dict[str, Any]) -> None:
        generator.state = state
        if _SEED_SEQUENCE in state:
            _set_seed_sequence(generator, np.random.SeedSequence(**state[_SEED_SEQUENCE]))

    return Stateful(get, put)


_SEED_SEQUENCE = "seed_sequence"
"""The entry of the seed sequence of a generator: those that it spawns must be the same ones as without a restart."""


def _plain_numbers(value: Any) -> Any:
    """Return a part of a seed sequence as an int, text or a list: numpy takes any sequence of integers, such as a range."""
    if value is None or isinstance(value, (str, int)):
        return value
    return int(value) if isinstance(value, np.integer) else [_plain_numbers(each) for each in value]


def _set_seed_sequence(generator: Any, saved: np.random.SeedSequence) -> None:
    try:
        generator.__setstate__((generator.state, saved))
    except TypeError:  # numpy 1 can't replace a seed sequence, but one of the same seed can catch up
        current = generator.seed_seq
        current.spawn(max(0, saved.n_children_spawned - current.n_children_spawned))


def _nested_tuple(state: Any) -> Any:
    return tuple(_nested_tuple(s) for s in state) if isinstance(state, (list, tuple)) else state


def _accelerators(torch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each kind of device that torch can use. Those of an extension need not exist."""
    for name in ("cuda", "xpu", "npu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            yield name, module


class RandomState:
    """The global random generators of Python, numpy, torch (host and every CUDA, XPU, NPU or MPS device) and each other
    framework that the process has imported, as one entry of a state.

    A save reads the generators; a load with the entry in `like` sets them. In a group, each rank stores its own.

        state = {"model": model, "random": ckpt.RandomState()}
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every generator that this process has."""
        found: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        torch = usable_torch()
        if torch is not None:
            found["torch"] = torch.get_rng_state()
            found.update({name: module.get_rng_state_all() for name, module in _accelerators(torch) if module.is_initialized()})
            if torch.backends.mps.is_available():
                found["mps"] = torch.mps.get_rng_state()
        found.update({name: file.random_state() for name, file in imported_files().items() if hasattr(file, "random_state")})
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators; those of a library that is not imported stay unchanged."""
        random.setstate(_nested_tuple(state["python"]))
        np.random.set_state(state["numpy"])
        torch = usable_torch()
        if torch is not None and "torch" in state:
            torch.set_rng_state(state["torch"])
            for name, module in _accelerators(torch):
                if name in state:
                    module.set_rng_state_all(state[name][: module.device_count()])
            if "mps" in state and torch.backends.mps.is_available():
                torch.mps.set_rng_state(state["mps"])
        for name, file in imported_files().items():
            if name in state and hasattr(file, "set_random_state"):
                file.set_random_state(state[name])
