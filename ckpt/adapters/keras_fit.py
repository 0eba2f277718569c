"""What `ckpt.adapters.keras` reads of a running `Model.fit`: its data, its other callbacks, and the random generators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import keras

from ckpt.adapters.running_fit import caller_locals
from ckpt.state.stateful import RandomState
from ckpt.storage.base.errors import CkptError, InvalidArgument

log = logging.getLogger("ckpt")

_END = object()

EpochBatches = Iterator[tuple[int, int, Iterator[Any]]]
"""For each call of the training function: the numbers of its first and last batch, and the iterator that yields them."""


class Snapshot(RandomState):
    """The random generators as they were at one time. A load fills it, and does not set the generators."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    @classmethod
    def taken(cls) -> Self:
        """Return the state that the generators have now."""
        made = cls()
        made._state = RandomState().state_dict()
        return made

    def set(self) -> None:
        """Set the generators to this state."""
        if self._state:
            RandomState().load_state_dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every generator."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this state, and leave the generators as they are."""
        self._state = state


def locals_of_fit(model: object) -> dict[str, Any]:
    """Return the local variables of the running `fit` of a model; a callback gets neither the data nor the other callbacks.

    Raises InvalidArgument outside of `fit`.
    """
    found = caller_locals("fit", lambda names: names.get("self") is model and "epoch_iterator" in names)
    if found is not None:
        return found
    raise InvalidArgument(
        "Checkpoints works in Model.fit of Keras 3, which does not run here: in a loop of your own, use ckpt.Checkpointer with "
        "the model as an entry of the state"
    )


def build_from_data(model: Any, iterator: Any) -> None:
    """Make the variables of a model and of its metrics, which fit makes only in its first step with tensorflow."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    def symbol(spec: Any) -> Any:
        return keras.KerasTensor(tuple(spec.shape), spec.dtype.name)

    model._symbolic_build(data_batch=tf.nest.map_structure(symbol, iterator._distributed_dataset.element_spec))


# --- the data ----------------------------------------------------------------------------------------------------


def read_batches(data: Iterator[Any], number: int) -> Any:
    """Read batches of an iterator; return the last one. Raises CkptError if there is none."""
    batch = None
    for _ in range(number):
        item = next(data, _END)
        if item is _END:
            break
        batch = item
    if batch is None:
        require_position(0, number)
    return batch


def require_position(read: int, saved: int) -> None:
    """Raise CkptError if fewer batches were read than are done in the saved epoch."""
    if read < saved:
        raise CkptError("the data ends before the position of the saved step: give fit the data that it had then")


def read_epoch(iterator: Any, original: Callable[[], EpochBatches]) -> None:
    """Read all batches of an epoch, as a fit does that trains on them.

    iterator: the EpochIterator of Keras. original: its method that yields the batches.
    """
    with iterator.catch_stop_iteration():
        for begin, end, data in original():
            for _ in range(end - begin + 1):
                if next(data, _END) is _END and iterator._num_batches is None:
                    raise StopIteration  # Keras learns here how many batches there are


def order_follows_global_generators(iterator: Any) -> bool:
    """Return whether the order of an epoch depends on the global generators alone, so that earlier epochs need not be read."""
    adapter = iterator.data_adapter
    if iterator.steps_per_epoch is not None or type(adapter).__name__ != "ArrayDataAdapter":
        return False
    return not adapter._shuffle or keras.backend.backend() in ("torch", "jax")


def begins_pass(iterator: Any) -> bool:
    """Return whether the next epoch begins a pass over arrays that takes several epochs.

    Only on torch: dropout draws from the generator from which the order of a pass follows.
    """
    if keras.backend.backend() != "torch" or iterator.steps_per_epoch is None:
        return False
    is_new = iterator._current_iterator is None or not iterator._steps_seen
    return is_new and type(iterator.data_adapter).__name__ == "ArrayDataAdapter"


def warn_of_random_order(iterator: Any) -> None:
    """Warn where tensorflow shuffles arrays in an order that another run of the script does not repeat."""
    adapter = iterator.data_adapter
    if keras.backend.backend() != "tensorflow" or type(adapter).__name__ != "ArrayDataAdapter" or not adapter._shuffle:
        return
    from tensorflow.python.eager import context

    if context.global_seed() is None:
        log.warning(
            "fit shuffles in an order that a resumed run will not repeat: call keras.utils.set_random_seed(seed) at the start "
            "of the script"
        )


# --- the other callbacks -----------------------------------------------------------------------------------------


def require_alone(callbacks: Iterable[object]) -> None:
    """Raise InvalidArgument if another callback of a fit restores the model, too."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise InvalidArgument(
                "BackupAndRestore would replace the model that Checkpoints restores, and begin in another epoch: remove "
                "BackupAndRestore from the callbacks"
            )


def call_before_first_epoch(callbacks: Any, function: Callable[[], None]) -> None:
    """Let the CallbackList of a fit call a function after `on_train_begin` and before `on_epoch_begin` of its callbacks."""

    def on_epoch_begin(*arguments: Any, **named: Any) -> None:
        del callbacks.on_epoch_begin
        function()
        callbacks.on_epoch_begin(*arguments, **named)

    callbacks.on_epoch_begin = on_epoch_begin


def move_to_end(callbacks: list[object], callback: object) -> None:
    """Let Keras call a callback after all others."""
    callbacks.remove(callback)
    callbacks.append(callback)


NO_STATE = {"params", "_model", "model", "validation_data", "min_delta"}
"""Attributes that Keras sets again in each run; the sign of min_delta depends on monitor_op, which is a function."""
