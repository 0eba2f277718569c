"""The arrays of an adapter of peft, under the names that peft gives them in a file.

In a model, the name of each adapter follows the parameter: `q_proj.lora_A.default.weight`. In a file it is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpt.storage.base.errors import CkptError
from ckpt.tools.step_contents import Array

_PARAMETERS = ("lora_", "ia3_", "hada_", "lokr_", "oft_", "trainable_tokens_")
"""How the parameters of the supported kinds of adapters begin."""
_REPLACED_MODULE = "modules_to_save"
"""Below it a model has trained copies of whole modules; a file has them under the names of the modules."""
_MAGNITUDE = "lora_magnitude_vector"


def find_adapter(names: Iterable[str], requested: str | None) -> str | None:
    """Return the name of the adapter to export, None if the names are those of a model without adapters.

    requested: the name that the user asked for.

    Raises CkptError if there are several adapters and none was requested, or if the requested one does not exist.
    """
    found = sorted({parts[i] for parts in map(_split, names) if (i := _adapter_index(parts)) is not None})
    if requested is not None:
        if requested not in found:
            has = f"use {', '.join(found)}" if found else "leave the option out, as the chosen leaves have no adapter"
            raise CkptError(f"--adapter {requested}: there is no adapter of this name; {has}")
        return requested
    if len(found) > 1:
        raise CkptError(f"the model has the adapters {', '.join(found)}: choose one with --adapter")
    return found[0] if found else None


def adapter_arrays(arrays: Iterable[Array], adapter: str, config: Mapping[str, object]) -> list[Array]:
    """Return the arrays of one adapter, under the names in a file of peft; raise CkptError for one that ckpt can't export."""
    if (bias := config.get("bias", "none")) not in ("none", None):
        raise CkptError(
            f"this adapter has trained biases (bias={bias!r}), and their names do not show which belong to it: load the step "
            "into the model, and use its save_pretrained"
        )
    found = []
    for array in arrays:
        parts = _split(array.name)
        index = _adapter_index(parts)
        if index is None or parts[index] != adapter:
            continue
        start = index - (parts[index - 1] == _REPLACED_MODULE)
        parts = [*parts[:start], *parts[index + 1 :]]
        if parts[-2:] == [_MAGNITUDE, "weight"]:
            parts.pop()
        found.append(replace(array, name=".".join(parts)))
    return found


def _split(name: str) -> list[str]:
    return name.split(".")


def _adapter_index(parts: list[str]) -> int | None:
    """Return the index of the adapter's name in the parts of a name; None if the name has none."""
    for index in range(len(parts) - 1, 0, -1):
        before = parts[index - 1]
        if before == _REPLACED_MODULE or before.startswith(_PARAMETERS):
            return index
    return None
