"""The state of MindSpore's objects: cells, optimizers, schedules, loss scalers, random generators and dataset iterators."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.amp import LossScaleManager, LossScaler
from mindspore.common.generator import Generator
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler

from ckpt.state.named_state import require_saved_names
from ckpt.state.stateful import Stateful
from ckpt.state.torch_keys import ModuleEntries
from ckpt.support.user_warning import warn_user

_OPTIMIZERS = (nn.Optimizer, optim.Optimizer)
_SCHEDULES = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau, lr_scheduler.SequentialLR)


def as_stateful(value: object) -> Stateful | None:
    """Return the functions that read and set the state of an object of MindSpore; None for other values.

    Raises TypeError for an object whose state cannot be reached.
    """
    if isinstance(value, nn.Cell):
        return _cell_stateful(value)
    if isinstance(value, (*_SCHEDULES, LossScaler, LossScaleManager)):
        return Stateful(lambda: attribute_state(value), lambda state: _set_attributes(value, state))
    if isinstance(value, Generator):
        return Stateful(lambda: {"state": _generator_bytes(value)}, lambda state: value.set_state(ms.Tensor(state["state"])))
    datasets = sys.modules.get("mindspore.dataset.engine")
    if datasets is None:
        return None
    if isinstance(value, datasets.iterators.Iterator):
        return Stateful(lambda: iterator_state(value), lambda state: _set_iterator(value, state))
    if isinstance(value, datasets.datasets.Dataset):
        raise TypeError("a dataset has no position: store its create_dict_iterator(num_epochs=…)")
    return None


# --- cells and optimizers --------------------------------------------------------------------------------------


def _cell_stateful(cell: Any) -> Stateful:
    kind = type(cell).__name__

    def get() -> dict[str, Any]:
        _warn_of_dropout(cell)
        return cell_state(cell)

    def like(saved: object, everything: bool) -> dict[str, Any]:
        state = cell_state(cell)
        if everything:
            require_saved_names(state, saved, kind)
        return state

    return Stateful(get, lambda _: None, like)  # a load fills the parameters in place


def cell_state(cell: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a cell by the names of the attributes.

    An optimizer has its moments, step and learning rate, but not the parameters that it trains.
    """
    return dict(_entries(cell, "", set()))


def _entries(cell: Any, prefix: str, open_cells: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors; a cell or tensor in two places has two names."""
    if id(cell) in open_cells:
        return
    trained = {id(parameter) for parameter in cell.parameters} if isinstance(cell, _OPTIMIZERS) else set()
    for name, parameter in cell._params.items():
        if parameter is not None and id(parameter) not in trained:
            yield prefix + name, getattr(parameter, "inited_param", None) or parameter
    for name in _persistent_buffers(cell):
        yield prefix + name, cell._buffers[name]
    if isinstance(cell, optim.Optimizer):
        for number, group in enumerate(cell.param_groups):
            yield f"{prefix}param_groups.{number}.lr", group["lr"]
    for name, child in cell._cells.items():
        if child is not None:
            yield from _entries(child, f"{prefix}{name}.", open_cells | {id(cell)})


def _persistent_buffers(cell: Any) -> list[str]:
    left_out = getattr(cell, "_non_persistent_buffers_set", ())
    return [name for name, value in getattr(cell, "_buffers", {}).items() if value is not None and name not in left_out]


def module_entries(value: object) -> ModuleEntries:
    """Return the names of the buffers of a cell, and of its parameters that are not trained."""
    buffers: list[str] = []
    frozen: list[str] = []
    if not isinstance(value, nn.Cell) or isinstance(value, _OPTIMIZERS):
        return ModuleEntries(buffers, frozen)
    for prefix, cell in value.cells_and_names():
        prefix = f"{prefix}." if prefix else ""
        buffers += [prefix + name for name in _persistent_buffers(cell)]
        # Parameters that are not trained may be values that the cell itself updates, such as the statistics of a norm.
        buffers += [prefix + name for name, p in cell._params.items() if p is not None and not p.requires_grad]
    return ModuleEntries(buffers, frozen)


_DROPOUTS = tuple(getattr(nn, name) for name in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d") if hasattr(nn, name))
_warned: set[str] = set()


def _warn_of_dropout(cell: Any) -> None:
    """Warn once that MindSpore gives no access to the random numbers of its dropout."""
    if "dropout" in _warned:
        return
    for name, child in cell.cells_and_names():
        if isinstance(child, _DROPOUTS) and child.training and child.p != 0:
            _warned.add("dropout")
            warn_user(
                f"the masks of {name or type(child).__name__} cannot be saved: after a resume they differ from those of the "
                "unbroken run. Call ckpt.adapters.mindspore.resumable_dropout(net) before the first step"
            )
            return


# --- schedules and loss scalers --------------------------------------------------------------------------------


def attribute_state(value: object) -> dict[str, Any]:
    """Return the attributes of a schedule or scaler that are tensors or plain values; of schedules in a list, theirs."""
    found = {}
    for name, item in vars(value).items():
        if isinstance(item, (list, tuple)) and item and all(isinstance(part, _SCHEDULES) for part in item):
            found[name] = [attribute_state(part) for part in item]
        elif _is_plain(item) or isinstance(item, ms.Tensor):
            found[name] = item
        elif isinstance(item, (list, tuple)) and all(_is_plain(part) or isinstance(part, ms.Tensor) for part in item):
            found[name] = list(item)
    return found


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _set_attributes(value: object, state: dict[str, Any]) -> None:
    """Set the plain attributes of an object, of which a load has filled the tensors in place; raise ValueError for a misfit."""
    current = attribute_state(value)
    if current.keys() != state.keys():
        both = f"{', '.join(sorted(current))}; the saved one {', '.join(sorted(state))}"
        raise ValueError(f"it has {both}: construct it as it was when saved")
    for name, item in state.items():
        if _is_plain(item):
            if item != current[name]:
                setattr(value, name, item)
        elif isinstance(item, list):
            for part, part_state in zip(getattr(value, name), item, strict=True):
                if isinstance(part, _SCHEDULES):
                    _set_attributes(part, part_state)


# --- random generators -----------------------------------------------------------------------------------------


def is_random_generator(value: object) -> bool:
    """Return whether `value` is a random generator, of which each rank has its own."""
    return isinstance(value, Generator)


def _generator_bytes(generator: Any) -> np.ndarray[Any, Any]:
    return np.array(generator.get_state().asnumpy())


def random_state() -> dict[str, Any]:
    """Return the global seed, the seeds of the next random functions in PyNative mode, and the default generator.

    The numbers that a kernel counts by itself (nn.Dropout, random functions in a compiled graph) cannot be read.
    """
    seeds = _seed_module()
    return {
        "seed": seeds._GLOBAL_SEED,
        "function_seeds": [[name, number, value] for (name, number), value in seeds._KERNEL_SEED.items()],
        "default_generator": np.array(ms.get_rng_state().asnumpy()),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the global seed and generators."""
    seeds = _seed_module()
    seeds._GLOBAL_SEED = state["seed"]
    seeds._KERNEL_SEED.clear()
    seeds._KERNEL_SEED.update({(name, number): value for name, number, value in state["function_seeds"]})
    ms.set_rng_state(ms.Tensor(state["default_generator"]))


def _seed_module() -> Any:
    return importlib.import_module("mindspore.common.seed")


# --- iterators of datasets -------------------------------------------------------------------------------------

_NO_SEED = 5489
"""The seed that mindspore.dataset has if none was set: each iterator then shuffles in another order."""


def iterator_state(iterator: Any) -> dict[str, Any]:
    """Return the number of batches that an iterator has given, and the seed of its shuffles."""
    seed = int(ms.dataset.config.get_seed())
    if seed == _NO_SEED:
        raise TypeError("the order of its samples is drawn at random: call mindspore.set_seed() before it is created")
    return {"batches": iterator._Iterator__index, "seed": seed}


def _set_iterator(iterator: Any, state: dict[str, Any]) -> None:
    """Move an iterator to a position; raise ValueError if it would give other batches than the saved one."""
    seed, batches = int(ms.dataset.config.get_seed()), int(state["batches"])
    if seed != state["seed"]:
        raise ValueError(
            f"the seed of mindspore.dataset is {seed}, the saved one {state['seed']}: call "
            f"mindspore.set_seed({state['seed']}) before it is created"
        )
    if iterator._Iterator__index != batches:
        if iterator._Iterator__index > batches:
            raise ValueError("it is ahead of the saved position: create it anew before the load")
        _move(iterator, batches)


def _move(iterator: Any, batches: int) -> None:
    dataset = iterator._Iterator__ori_dataset
    try:  # MindSpore can't skip to the end of the last epoch, so the last batch is read
        iterator._reset(batches - 1, dataset.get_dataset_size())
        iterator._Iterator__index = batches - 1
    except RuntimeError:  # an iterator without a number of epochs can't skip, and breaks: start it again, and read all batches
        kind = sys.modules["mindspore.dataset.engine"].iterators.Iterator
        kind.__init__(iterator, dataset, -1, iterator._output_numpy, iterator._do_copy)
    while iterator._Iterator__index < batches:
        next(iterator, None)
