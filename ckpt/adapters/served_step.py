"""A step as the source of a server's weights: the options of the load format `ckpt`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from ckpt.adapters.weights import iterate_weights, open_step, weight_names
from ckpt.errors import LeafNotFound
from ckpt.storage.base.errors import CkptError, InvalidArgument

_TYPES = {"step": int, "prefix": str, "rename": dict, "strict": bool}


@dataclass(frozen=True)
class ServedStep:
    """A step, and the part of it that is the model, as `model_loader_extra_config` of a server names them.

    url: default: that in CKPT_DIR.
    step: default: the newest.
    prefix, rename: as for `iterate_weights`.
    strict: whether a missing weight is an error.
    """

    url: str | None = None
    step: int | None = None
    prefix: str = ""
    rename: Mapping[str, str] | None = None
    strict: bool = True

    @classmethod
    def from_options(cls, options: object) -> Self:
        """Return what `model_loader_extra_config` names; InvalidArgument for an unknown option or another type."""
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(options, dict) or (unknown := [name for name in options if name not in known]):
            given = ", ".join(unknown) if isinstance(options, dict) else repr(options)
            raise InvalidArgument(f"model_loader_extra_config: ckpt has no option {given}; use {', '.join(known)}")
        for name, kind in _TYPES.items():
            if (value := options.get(name)) is not None and type(value) is not kind:
                raise InvalidArgument(f"model_loader_extra_config: {name}={value!r}: give a value of type {kind.__name__}")
        return cls(**options)

    def with_number(self, group: Any) -> Self:
        """Return these options with the number of a step: the named one, or the newest that the first rank of `group` finds.

        group: a group of ranks of vLLM or SGLang, all of which call this; None for a process alone.

        Raises what opening the step raises; on the other ranks CkptError.
        """
        found: int | str | None = None
        cause: Exception | None = None
        if group is None or group.rank_in_group == 0:
            try:
                found = open_step(self.url, self.step).step
            except Exception as error:  # the other ranks wait for an answer
                found, cause = f"{type(error).__name__}: {error}", error
        if group is not None:
            found = group.broadcast_object(found)
        if cause is not None:
            raise cause
        if not isinstance(found, int):
            raise CkptError(f"the first rank can't open the step ({found}): see its log")
        return dataclasses.replace(self, step=found)

    def names(self) -> set[str]:
        """Return the names of the weights."""
        names = weight_names(open_step(self.url, self.step), self.prefix, self.rename)
        return {name for each in names.values() for name in each}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the names and tensors of the weights, each verified."""
        return iterate_weights(self.url, self.step, prefix=self.prefix, rename=self.rename)

    def require(self, missing: Sequence[str]) -> None:
        """Raise LeafNotFound if weights are missing, unless `strict` is false."""
        if missing and self.strict:
            raise LeafNotFound(
                f"the step lacks {len(missing)} weights of the model, such as {', '.join(sorted(missing)[:3])}: check prefix "
                "and rename, or set strict to false"
            )
