"""The load format `ckpt` of vLLM: a server reads its weights from a step, without an export.

    vllm serve my-config --load-format ckpt --model-loader-extra-config '{"url": "/data/run", "prefix": "model"}'

vLLM calls `register` through the entry point `vllm.general_plugins` in each of its processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ckpt.adapters.load_format import LOAD_FORMAT
from ckpt.adapters.served_step import ServedStep
from ckpt.storage.base.errors import InvalidArgument


def register() -> None:
    """Register the load format with vLLM."""
    register_model_loader(LOAD_FORMAT)(VllmStepLoader)


class VllmStepLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads the weights of a step; everything else is done as vLLM does it for safetensors.

    `model_loader_extra_config` has the options of `ServedStep`. The key file is that in CKPT_KEY_FILE.
    """

    def __init__(self, load_config: Any) -> None:
        if not hasattr(DefaultModelLoader, "track_weights_loading"):  # an older vLLM calls no check for missing weights
            raise InvalidArgument(f"the load format ckpt needs a newer vLLM than {vllm.__version__}: pip install -U vllm")
        self._options = self._step = ServedStep.from_options(load_config.model_loader_extra_config or {})
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config={}))

    def download_model(self, model_config: Any) -> None:
        """Check that the step and the part of it exist; nothing is downloaded."""
        self._options.names()

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the names and tensors of the step; each process reads all, and its layers take their part of each.

        All ranks load the step that the first one finds, also if another step is saved meanwhile.
        """
        self._step = self._options.with_number(get_world_group() if torch.distributed.is_initialized() else None)
        return self._step.tensors()

    def track_weights_loading(self, model: torch.nn.Module, loaded_weights: set[str], *args: Any, **further: Any) -> None:
        """Raise LeafNotFound if a parameter was not loaded. vLLM itself does not check those of linear layers."""
        missing = [name for name, _ in model.named_parameters() if name not in loaded_weights]
        missing += _missing_parts(self._step.names(), getattr(model, "packed_modules_mapping", {}))
        self._step.require(missing)
        super().track_weights_loading(model, loaded_weights, *args, **further)


def _missing_parts(names: set[str], packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the missing names of groups of weights that vLLM merges into one, such as query, key and value."""
    found = []
    for name in names:
        module, _, last = name.rpartition(".")
        parent, _, child = module.rpartition(".")
        for parts in packed.values():
            if child in parts and len(parts) > 1:
                found += [each for part in parts if (each := f"{parent}.{part}.{last}") not in names]
    return sorted(set(found))
