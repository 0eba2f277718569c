"""Reads universal checkpoints of DeepSpeed, which have a folder with a file of torch.save for each state of each parameter.

The state has the layout of `ckpt.adapters.torch.ModelState`, which fills a model and its optimizer on any number of ranks. In a
checkpoint of ZeRO stage 3 the parameters are flat. Their shapes, and all that a folder of ZeRO has besides, are in the files of
the ranks that DeepSpeed copies into it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt.storage.base.errors import CkptError
from ckpt.tools.common import import_optional
from ckpt.tools.import_files import DAMAGE, FileLeaf, list_folder, raise_if_unreadable, read_pointer
from ckpt.tools.import_torch import read_state as read_torch_file
from ckpt.tools.import_zero import (
    Part,
    PartitionGroup,
    base_state,
    leaf_of_parts,
    other_weights,
    rank_files,
    read_rank_file,
    step_tensor,
    whole_state,
)

_WEIGHTS = "fp32"
_FILE_OF_STAGE_3 = re.compile(r"zero_pp_rank_\d+_mp_rank_(\d+)_model_states\.pt")


def read_state(source: Path) -> dict[str, Any]:
    """Return the fp32 weights, and the moments of the optimizer, by the names of the parameters."""
    zero = _zero_folder(source)
    if _has_flat_parameters(zero):
        return _read_stage_3(zero)
    folders = [path for path in list_folder(zero, "[!.]*") if path.is_dir()]
    if not folders:
        raise CkptError(f"{zero} has no parameters, so it is not a complete universal checkpoint: convert it again")
    model: dict[str, FileLeaf] = {}
    moments: dict[str, dict[str, Any]] = {}
    for folder in folders:
        states = {path.stem: _read_parameter(path) for path in list_folder(folder, "*.pt")}
        if _WEIGHTS not in states:
            raise CkptError(f"{folder} has no {_WEIGHTS}.pt, so the checkpoint is incomplete: copy or convert it again")
        model[folder.name] = states.pop(_WEIGHTS)
        for name, value in states.items():
            if isinstance(value, FileLeaf) and value.shape not in ((), (1,), model[folder.name].shape):
                raise CkptError(f"{folder}/{name}.pt does not have the shape of {_WEIGHTS}.pt: convert the checkpoint again")
        moments[folder.name] = states
    first = next(iter(model))
    optimizer = {"state": moments, "group_of": dict.fromkeys(model, first), "groups": {first: {}}}
    return {"model": model, "optimizer": optimizer}


def _zero_folder(source: Path) -> Path:
    """Return the folder of the parameters: of the checkpoint itself, or of the one that `latest_universal` names beside it."""
    latest = source / "latest_universal"
    if latest.is_file():
        source = source / Path(read_pointer(latest).strip()).name
    if not (source / "zero").is_dir():
        raise CkptError(f"{source} has no folder zero, so it is not a universal checkpoint: name the folder that has it")
    return source / "zero"


def _read_parameter(path: Path) -> Any:
    """Return the tensor of a file, or its number as a tensor, as optimizers of torch have it."""
    value = read_torch_file(path)
    if path.stem == "step":
        torch = import_optional("torch", "a checkpoint of DeepSpeed", "torch")
        return torch.tensor(float(value)) if isinstance(value, (int, float)) else value
    if not isinstance(value, dict) or not isinstance(value.get("param"), FileLeaf):
        raise CkptError(
            f"{path} has no shaped parameter, and zero_pp_rank_*_model_states.pt with the shapes of ZeRO stage 3 is missing: "
            "import the folder that ds_to_universal has converted"
        )
    return value["param"]


# --- stage 3 ---------------------------------------------------------------------------------------------------


def _has_flat_parameters(zero: Path) -> bool:
    """Return whether a checkpoint is of stage 3 without tensor parallelism: its parameters are flat then."""
    found = [match for path in list_folder(zero.parent, "*") if (match := _FILE_OF_STAGE_3.fullmatch(path.name))]
    return bool(found) and all(int(match[1]) == 0 for match in found)


def _read_stage_3(zero: Path) -> dict[str, Any]:
    folder = zero.parent
    try:
        optimizer = read_rank_file(zero / "optimizer_state.pt")
        models = [read_rank_file(path) for path in rank_files(folder, int(optimizer["partition_count"]))]
        groups = list(_groups(zero, models[0]["param_shapes"], base_state(optimizer)))
        model = {name: leaf for group in groups for name, leaf in group.weights.items()}
        model |= other_weights(models, model, True)
        return whole_state(folder, model, groups, models[0], optimizer)
    except FileNotFoundError as error:
        raise CkptError(f"{error.filename} does not exist: the universal checkpoint is incomplete; convert it again") from error
    except DAMAGE as error:
        raise_if_unreadable(error, str(folder))
        raise CkptError(
            f"the files of {folder} do not have the layout of DeepSpeed ({type(error).__name__}: {error}): import the folder "
            "that ds_to_universal has converted"
        ) from error


def _groups(zero: Path, shapes_of_groups: Sequence[dict[str, Any]], base: dict[str, Any]) -> Iterator[PartitionGroup]:
    owner = {index: number for number, group in enumerate(base["param_groups"]) for index in group["params"]}
    for index, shapes in enumerate(shapes_of_groups):
        states = {name: _flat_states(zero / name, tuple(shape)) for name, shape in shapes.items()}
        weights = {name: values.pop(_WEIGHTS) for name, values in states.items()}
        if "step" in base["state"][index]:
            for values in states.values():
                values["step"] = step_tensor(base["state"][index]["step"])
        options = {key: value for key, value in base["param_groups"][owner[index]].items() if key != "params"}
        yield PartitionGroup(weights, states, options, owner[index])


def _flat_states(folder: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the weights and moments of a parameter from its flat files."""
    found = {}
    size = math.prod(shape)
    for path in list_folder(folder, "*.pt"):
        flat = read_torch_file(path)
        if not isinstance(flat, FileLeaf) or flat.shape != (size,):
            raise CkptError(f"{path} does not have the {size} elements of its parameter: convert the checkpoint again")
        found[path.stem] = leaf_of_parts(shape, [Part(0, 0, size, 0)], [flat])
    return found
