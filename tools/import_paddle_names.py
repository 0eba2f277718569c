"""Names the state of a Paddle optimizer after the parameters of its layer, as ckpt.adapters.paddle.ModelState does."""

from __future__ import annotations

from typing import Any

from ckpt.storage.base.errors import CkptError

NAMES = "StructuredToParameterName@@"
"""The key of a saved state dict with Paddle's names of its tensors."""
_MASTERS = "master_weights"
_MASTER = "_fp32_master_0"


def join_states(model: dict[str, Any], names: dict[str, str], optimizer: Any, where: str) -> dict[str, Any]:
    """Return the state of a ModelState.

    model: the state_dict of the layer.
    names: by its names, those that Paddle gave the parameters, such as `linear_0.w_0`.
    optimizer: the state_dict of the optimizer, whose names are like `linear_0.w_0_moment1_0`.
    where: the file of the optimizer, for messages.
    """
    if not isinstance(optimizer, dict):
        raise CkptError(f"{where} is not a state_dict() of an optimizer: import each file to a step of its own")
    owners: dict[str, str] = {}
    for name, given in names.items():
        owners.setdefault(given, name)
    state: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"state": state}
    for key, value in optimizer.items():
        if key == "LR_Scheduler":
            found[key] = value
        elif key == _MASTERS:
            for given, weight in value.items():
                state.setdefault(_owner(owners, given, where), {})["master_weight"] = weight
        else:
            given = max((one for one in owners if key.startswith(f"{one}_")), key=len, default="")
            name = _owner(owners, given or key, where)
            entry = key[len(given) :].removeprefix(_MASTER).removeprefix("_").removesuffix("_0")
            state.setdefault(name, {})[entry] = value
    return {"model": model, "optimizer": found}


def _owner(owners: dict[str, str], given: str, where: str) -> str:
    if given not in owners:
        raise CkptError(
            f"{where} has {given}, which belongs to no parameter of the .pdparams file: save both in one process, or import "
            "each file to a step of its own"
        )
    return owners[given]
