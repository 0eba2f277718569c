"""What a BaseFinetuning callback of Lightning has frozen, which Lightning does not restore in a resumed run."""

from __future__ import annotations

from typing import Any

from ckpt.adapters.lightning_packages import has_callback


def frozen_parts(trainer: Any) -> dict[str, str]:
    """Return the names of frozen parameters ("parameters") and of batch norms that keep their statistics ("norms"), one a line.

    It is an empty dict without a BaseFinetuning callback. Such a callback freezes layers at the start, and unfreezes them at
    the start of an epoch, which a resumed run has passed.
    """
    if not has_callback(trainer, "BaseFinetuning"):
        return {}
    model = trainer.lightning_module
    return {
        "parameters": "\n".join(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
        "norms": "\n".join(name for name, norm in _norms(model) if not norm.track_running_stats),
    }


def freeze_parts(trainer: Any, frozen: dict[str, str]) -> None:
    """Freeze these parts of the model, and unfreeze the others, if the Trainer has a BaseFinetuning callback.

    frozen: what `frozen_parts` returned.
    """
    if not frozen or not has_callback(trainer, "BaseFinetuning"):
        return
    parameters, norms = (set(frozen[key].split("\n")) for key in ("parameters", "norms"))
    for name, parameter in trainer.lightning_module.named_parameters():
        parameter.requires_grad = name not in parameters
    for name, norm in _norms(trainer.lightning_module):
        norm.track_running_stats = name not in norms


def _norms(model: Any) -> list[tuple[str, Any]]:
    """Return the batch norms of a model, with their names."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
