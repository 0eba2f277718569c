"""Reads checkpoints of DeepSpeed ZeRO, which have a file with flat partitions of the weights and moments for each rank.

The state is that of `ckpt.adapters.deepspeed.EngineState`, in the layout of `ckpt.adapters.torch.ModelState`. The tensors stay
in the files: each parameter is a leaf of parts of the partitions. Objects of DeepSpeed in the files become stand-ins without
code.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.adapters.deepspeed_names import COUNTERS, SCALER_FIELDS
from ckpt.state.boxes import flat_boxes, whole_box
from ckpt.storage.base.errors import CkptError
from ckpt.tools.common import import_optional
from ckpt.tools.import_files import (
    DAMAGE,
    FileLeaf,
    FileRegion,
    contiguous_strides,
    list_folder,
    raise_if_unreadable,
    read_pointer,
)
from ckpt.tools.import_torch import read_state as read_torch_file

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_DEEPSPEED_CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", "deepspeed.utils.tensor_fragment.fragment_address",
)  # fmt: skip
_OWN_ENTRIES = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "universal_checkpoint_info",
    "num_experts", "ds_autoep_layers", "checkpoint_parallel_dimensions",
))  # fmt: skip
"""The entries of a model file that are not a `client_state` of the user."""


_STEP_BYTES = 8
"""The most bytes of a step count that is a tensor."""


class StandIn:
    """An object of DeepSpeed in a file, of which only the attributes are read."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


def _stand_ins() -> list[Any]:
    found: list[Any] = [_enum_member]
    for name in _DEEPSPEED_CLASSES:
        module, _, short = name.rpartition(".")
        found.append(type(short, (StandIn,), {"__module__": module, "__qualname__": short}))
    return found


def _enum_member(of: type, name: str) -> StandIn:
    """Return the stand-in for a member of an enumeration, which Python 3.11.2 (Debian 12) stores as a call of `getattr`.

    Raises UnpicklingError for an attribute of anything else.
    """
    if not (isinstance(of, type) and issubclass(of, StandIn)):
        raise pickle.UnpicklingError("Unsupported global: getattr of an object that is not an enumeration of DeepSpeed")
    return of(name)


_enum_member.__module__, _enum_member.__qualname__, _enum_member.__name__ = "builtins", "getattr", "getattr"


def read_state(source: Path) -> dict[str, Any]:
    """Return the weights, the optimizer, the LR scheduler, the counters and the client_state of a checkpoint."""
    import_optional("torch", "a checkpoint of DeepSpeed", "torch")
    folder = _tag_folder(source)
    try:
        return _read_folder(folder)
    except DAMAGE as error:
        raise_if_unreadable(error, str(folder))
        raise CkptError(
            f"the files of {folder} do not have the layout of DeepSpeed ({type(error).__name__}: {error}): convert the "
            "checkpoint with ds_to_universal, and import that"
        ) from error


def _read_folder(folder: Path) -> dict[str, Any]:
    optimizers = [read_rank_file(path)["optimizer_state_dict"] for path in _optimizer_files(folder)]
    first_file = list_folder(folder, "*mp_rank_00_model_states.pt")
    if not first_file:
        raise CkptError(f"{folder} has no *_model_states.pt: the checkpoint is incomplete; copy it again")
    is_stage_3 = "fp32_flat_groups" in optimizers[0]
    files = rank_files(folder, len(optimizers)) if is_stage_3 else first_file[:1]
    models = [read_rank_file(path) for path in files]
    _require_one_save(folder, models, optimizers)
    layout = _stage_3(models[0], optimizers) if is_stage_3 else _stages_1_and_2(folder, models[0], optimizers)
    groups = list(layout)
    model = {name: leaf for group in groups for name, leaf in group.weights.items()}
    model |= other_weights(models, model, is_stage_3)
    return whole_state(folder, model, groups, models[0], optimizers[0])


def whole_state(
    folder: Path,
    model: dict[str, Any],
    groups: Sequence[PartitionGroup],
    model_file: dict[str, Any],
    optimizer_file: dict[str, Any],
) -> dict[str, Any]:
    """Return the state of a checkpoint.

    folder: the checkpoint, whose name is its tag.
    model: the weights by name, without those that are equal to others.
    model_file, optimizer_file: what rank 0 has saved.
    """
    for alias, name in (model_file.get("shared_params") or {}).items():
        if name in model:
            model[alias] = model[name]
    found = {"model": model, "optimizer": _optimizer(groups), "engine": _counters(folder, model_file, optimizer_file)}
    if model_file.get("lr_scheduler") is not None:
        found["lr_scheduler"] = model_file["lr_scheduler"]
    client_state = {key: value for key, value in model_file.items() if key not in _OWN_ENTRIES}
    return found | ({"client_state": client_state} if client_state else {})


# --- the files -------------------------------------------------------------------------------------------------


def _tag_folder(source: Path) -> Path:
    """Return the folder of one checkpoint: the source itself, or the one that its file `latest` names."""
    if (source / "latest").is_file():
        source = source / Path(read_pointer(source / "latest").strip()).name
    if not any(_OPTIMIZER_FILE.fullmatch(path.name) for path in list_folder(source, "*.pt")):
        raise CkptError(f"{source} has no zero_pp_rank_*_optim_states.pt: name the folder of one checkpoint, as global_step100")
    return source


def _optimizer_files(folder: Path) -> list[Path]:
    """Return the optimizer file of each rank, in order."""
    by_rank: dict[int, Path] = {}
    for path in list_folder(folder, "*.pt"):
        if (found := _OPTIMIZER_FILE.fullmatch(path.name)) is None:
            continue
        if int(found[2]):
            raise CkptError(f"{path} is of tensor parallelism: convert the checkpoint with ds_to_universal, and import that")
        if int(found[1]) in by_rank:
            raise CkptError(f"{folder} has two optimizer files of rank {int(found[1])}: remove those of another save")
        by_rank[int(found[1])] = path
    if missing := [rank for rank in range(max(by_rank) + 1) if rank not in by_rank]:
        raise CkptError(f"{folder} lacks the optimizer file of rank {missing[0]}: copy the checkpoint again")
    return [by_rank[rank] for rank in sorted(by_rank)]


def rank_files(folder: Path, ranks: int) -> list[Path]:
    """Return the model file of each rank, which stage 3 has; raise CkptError if one is missing."""
    files = []
    for rank in range(ranks):  # a damaged number of ranks may be huge
        files.append(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        if not files[-1].is_file():
            raise CkptError(f"{files[-1]} does not exist: the checkpoint is incomplete; copy it again")
    return files


def read_rank_file(path: Path) -> Any:
    """Return what DeepSpeed has saved in a file, with stand-ins for its own objects."""
    return read_torch_file(path, _stand_ins())


def _require_one_save(folder: Path, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Raise CkptError if the files are of saves of different steps or numbers of ranks, as after a save that was killed."""
    counts = {_as_list(each["partition_count"])[0] for each in optimizers}
    if counts != {len(optimizers)}:
        raise CkptError(
            f"{folder} has the optimizer files of {len(optimizers)} ranks, and was saved by {max(counts)}: copy it again"
        )
    options = [_without_parameters(base_state(each)["param_groups"]) for each in optimizers]
    steps = [_step_counts(each) for each in optimizers]
    is_mixed = any(counts.get(number, step) != step for counts in steps for number, step in steps[0].items())
    if is_mixed or any(other != options[0] for other in options) or len({each["global_steps"] for each in models}) > 1:
        raise CkptError(f"{folder} has files of different steps: the save was killed, so import the checkpoint before it")


def _without_parameters(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _step_counts(optimizer: Any) -> dict[Any, Any]:
    """Return the step count of each flat partition, as its bytes if it is a tensor."""
    found = {}
    for number, state in base_state(optimizer)["state"].items():
        step = state.get("step")
        if isinstance(step, FileLeaf):
            if step.nbytes > _STEP_BYTES:
                raise ValueError("a step count is not a number")
            data = np.empty(step.nbytes, np.uint8)
            step.read(whole_box(step.shape), data)
            step = data.tobytes()
        found[number] = step
    return found


def _as_list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def base_state(optimizer: Any) -> dict[str, Any]:
    """Return the state_dict of the torch optimizer, whose parameters are the flat partitions."""
    found = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    if not isinstance(found, dict) or "state" not in found:
        raise CkptError("the checkpoint was saved with elastic_checkpoint: convert it with ds_to_universal, and import that")
    return found


# --- the partitions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionGroup:
    """The parameters of one flat partition of each rank, with the states and options of the optimizer."""

    weights: dict[str, FileLeaf]
    states: dict[str, dict[str, Any]]
    options: dict[str, Any]
    number: int
    """Of the group of the optimizer."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where one rank has a part of a parameter."""

    rank: int
    first: int
    """The first element in the flattened parameter."""
    end: int
    start: int
    """The first element in the flat partition of the rank."""


def _stages_1_and_2(folder: Path, model: Any, optimizers: Sequence[Any]) -> Iterator[PartitionGroup]:
    """Yield the groups. The parameters of a group lie one after the other, and the ranks have equal parts of the whole."""
    base = [base_state(each) for each in optimizers]
    paddings = optimizers[0].get("param_alignment_paddings")
    for number, shapes in enumerate(model["param_shapes"]):
        weights = [each["single_partition_of_fp32_groups"][number] for each in optimizers]
        length = max(leaf.shape[0] for leaf in weights)
        parts: dict[str, list[Part]] = {}
        at = 0
        for index, (name, shape) in enumerate(shapes.items()):
            size = math.prod(shape)
            cuts = ((rank, max(at, rank * length), min(at + size, (rank + 1) * length)) for rank in range(len(weights)))
            parts[name] = [Part(rank, a - at, b - at, a - rank * length) for rank, a, b in cuts if a < b]
            at += size + (paddings[number][index] if paddings else 0)
        yield _group(shapes, parts, weights, [each["state"].get(number, {}) for each in base], base[0], number, number)


def _stage_3(model: Any, optimizers: Sequence[Any]) -> Iterator[PartitionGroup]:
    """Yield the groups. Each rank has an equal part of each parameter; the last one is filled up."""
    base = [base_state(each) for each in optimizers]
    owner = {index: number for number, group in enumerate(base[0]["param_groups"]) for index in group["params"]}
    for number, shapes in enumerate(model["param_shapes"]):
        parts: dict[str, list[Part]] = {}
        at = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            length = -(-size // len(optimizers))
            cuts = ((rank, rank * length, min(size, (rank + 1) * length)) for rank in range(len(optimizers)))
            parts[name] = [Part(rank, a, b, at) for rank, a, b in cuts if a < b]
            at += length
        weights = [each["fp32_flat_groups"][number] for each in optimizers]
        yield _group(shapes, parts, weights, [each["state"].get(number, {}) for each in base], base[0], number, owner[number])


def _group(
    shapes: dict[str, Any], parts: dict[str, list[Part]], weights: Sequence[FileLeaf], states: Sequence[dict[str, Any]],
    base: dict[str, Any], index: int, number: int,
) -> PartitionGroup:  # fmt: skip
    """Return a group. index: of the flat partition in the optimizer's state; number: of its group of options."""
    found: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    for key, value in states[0].items():
        for name, shape in shapes.items():
            if isinstance(value, FileLeaf) and key != "step" and value.shape and value.shape != (1,):
                found[name][key] = leaf_of_parts(tuple(shape), parts[name], [state[key] for state in states])
            else:
                found[name][key] = step_tensor(value) if key == "step" else value
    options = {key: value for key, value in base["param_groups"][number].items() if key != "params"}
    made = {name: leaf_of_parts(tuple(shape), parts[name], weights) for name, shape in shapes.items()}
    return PartitionGroup(made, found, options, number)


def step_tensor(value: Any) -> Any:
    """Return the step count as a tensor, as optimizers of torch have it."""
    if isinstance(value, FileLeaf):
        return value
    return import_optional("torch", "a checkpoint of DeepSpeed", "torch").tensor(float(value))


def leaf_of_parts(shape: tuple[int, ...], parts: Sequence[Part], partitions: Sequence[FileLeaf]) -> FileLeaf:
    """Return the leaf of a whole parameter from its parts in the flat partitions of the ranks."""
    regions = []
    for part in parts:
        flat = getattr(partitions[part.rank], "single_region", None)  # None in a file of torch before 1.6
        if flat is None or not flat.is_contiguous or part.start + part.end - part.first > flat.shape[0]:
            raise CkptError(
                f"the partition of rank {part.rank} is shorter than its parameters, or not in a file of torch 1.6 or newer: "
                "convert the checkpoint with ds_to_universal, and import that"
            )
        offset = flat.offset + part.start * flat.itemsize
        for box in flat_boxes(shape, part.first, part.end):
            strides = contiguous_strides(box.shape, flat.itemsize)
            regions.append((box, FileRegion(flat.path, offset, box.shape, strides, flat.itemsize)))
            offset += box.size * flat.itemsize
    return FileLeaf(partitions[0].dtype, shape, regions)


# --- the other entries -----------------------------------------------------------------------------------------


def other_weights(models: Sequence[Any], trained: dict[str, Any], is_stage_3: bool) -> dict[str, Any]:
    """Return the buffers and the frozen parameters."""
    first = models[0]
    if not is_stage_3:
        shared = first.get("shared_params") or {}
        return {name: value for name, value in first["module"].items() if name not in trained and name not in shared}
    found = {name: first["module"][name] for name in first["buffer_names"]}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        fragments = [each["frozen_param_fragments"][name] for each in models]
        size = math.prod(shape)
        length = -(-size // len(models))
        cuts = ((rank, rank * length, min(size, (rank + 1) * length)) for rank in range(len(models)))
        found[name] = leaf_of_parts(tuple(shape), [Part(rank, a, b, 0) for rank, a, b in cuts if a < b], fragments)
    return found


def _optimizer(groups: Sequence[PartitionGroup]) -> dict[str, Any]:
    """Return the optimizer in the layout of ModelState. The name of a group is that of its first parameter."""
    labels: dict[int, str] = {}
    found: dict[str, Any] = {"state": {}, "group_of": {}, "groups": {}}
    for group in groups:
        if not group.weights:
            raise ValueError("a group has no parameters")
        label = labels.setdefault(group.number, next(iter(group.weights)))
        found["groups"][label] = group.options
        found["group_of"] |= dict.fromkeys(group.weights, label)
        found["state"] |= {name: values for name, values in group.states.items() if values}
    return found


def _counters(folder: Path, model: Any, optimizer: Any) -> dict[str, Any]:
    scaler = optimizer.get("loss_scaler")
    found = {name: model[name] for name in COUNTERS if name in model}
    fields = {name: getattr(scaler, name) for name in SCALER_FIELDS if hasattr(scaler, name)}
    return found | {"tag": folder.name, "without_frozen": False, "loss_scaler": fields}
