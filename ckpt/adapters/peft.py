"""The class AdapterState, which saves the adapters of a peft model without the base model."""

from __future__ import annotations

from typing import Any

from ckpt.adapters.torch import ModelState


class AdapterState(ModelState):
    """The adapters of a peft model and their optimizer as one entry of a state, as `ckpt.adapters.torch.ModelState`.

        state = {"train": AdapterState(model, optimizer)}

    It saves the parameters of all adapters, other parameters that are trained, and all buffers. Frozen parameters of the base
    model are not saved: load the same base model before a restore.
    """

    def _models_state(self) -> dict[str, Any]:
        found = super()._models_state()
        selected = {self._experts.name(name) for model in self._models for name in self._selected(model)}
        return {name: value for name, value in found.items() if name in selected}

    def _selected(self, model: Any) -> list[str]:
        """Return the names of what is saved."""
        return _adapter_names(model)

    def _set_model(self, model: Any, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(model, state, options=StateDictOptions(strict=False))


def is_peft_model(model: object) -> bool:
    """Return whether a model has adapters of peft, and a base model that they leave unchanged."""
    return hasattr(model, "peft_config") and any(c.__name__ == "PeftModel" for c in type(model).__mro__)


def _adapter_names(model: Any) -> list[str]:
    """Return the names of what a training run of the adapters changes, or needs besides the base model."""
    parts = {f".{adapter}" for adapter in model.peft_config}
    found = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or any(f"{part}." in name or name.endswith(part) for part in parts):
            found.append(name)
    return found
