"""Reads universal checkpoints of DeepSpeed, which have a folder with a file of torch.save for each state of each parameter.

The state has the layout of `ckpt.adapters.torch.ModelState`, which fills a model and its optimizer on any number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt.storage.base.errors import CkptError
from ckpt.tools.common import import_optional
from ckpt.tools.import_files import FileLeaf
from ckpt.tools.import_torch import read_state as read_file

_WEIGHTS = "fp32"


def read_state(source: Path) -> dict[str, Any]:
    """Return the fp32 weights, and the moments of the optimizer, by the names of the parameters."""
    zero = _zero_folder(source)
    folders = sorted(path for path in zero.iterdir() if (path / f"{_WEIGHTS}.pt").is_file())
    if not folders:
        raise CkptError(f"{zero} has no parameters, so that it is no complete universal checkpoint: convert it again")
    model: dict[str, FileLeaf] = {}
    moments: dict[str, dict[str, Any]] = {}
    for folder in folders:
        states = {path.stem: _read_parameter(path) for path in sorted(folder.glob("*.pt"))}
        model[folder.name] = states.pop(_WEIGHTS)
        for name, value in states.items():
            if isinstance(value, FileLeaf) and value.shape not in ((), (1,), model[folder.name].shape):
                raise CkptError(f"{folder}/{name}.pt has not the shape of {_WEIGHTS}.pt: convert the checkpoint again")
        moments[folder.name] = states
    first = next(iter(model))
    optimizer = {"state": moments, "group_of": dict.fromkeys(model, first), "groups": {first: {}}}
    return {"model": model, "optimizer": optimizer}


def _zero_folder(source: Path) -> Path:
    """Return the folder of the parameters: of the checkpoint itself, or of the one that `latest_universal` names beside it."""
    latest = source / "latest_universal"
    if latest.is_file():
        source = source / Path(latest.read_text().strip()).name
    if not (source / "zero").is_dir():
        raise CkptError(f"{source} has no folder zero, so that it is no universal checkpoint: name the folder that has it")
    return source / "zero"


def _read_parameter(path: Path) -> Any:
    """Return the tensor of a file, or its number as a tensor, as optimizers of torch have it."""
    value = read_file(path)
    if path.stem == "step":
        torch = import_optional("torch", "a checkpoint of DeepSpeed", "torch")
        return torch.tensor(float(value)) if isinstance(value, (int, float)) else value
    if not isinstance(value, dict) or not isinstance(value.get("param"), FileLeaf):
        raise CkptError(
            f"{path} has no shaped parameter, as those of ZeRO stage 3, which are flat: import the folder that "
            "ds_to_universal has converted"
        )
    return value["param"]
