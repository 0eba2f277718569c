"""The load format `ckpt` of vLLM: a server reads its weights from a step, without an export.

    vllm serve my-config --load-format ckpt --model-loader-extra-config '{"url": "/data/run", "prefix": "model"}'

vLLM calls `register` through the entry point `vllm.general_plugins` in each of its processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ckpt.adapters.weights import iterate_weights, open_step, weight_names
from ckpt.storage.base.errors import InvalidArgument

LOAD_FORMAT = "ckpt"
_OPTIONS = ("url", "step", "prefix", "rename")


def register() -> None:
    """Register the load format with vLLM."""
    register_model_loader(LOAD_FORMAT)(StepLoader)


class StepLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads the weights of a step; everything else is done as vLLM does it for safetensors, with its check of missing weights.

    `model_loader_extra_config` has url (default: that in CKPT_DIR), step (default: the newest), prefix and rename, as
    `iterate_weights` takes them. The key file is that in CKPT_KEY_FILE.
    """

    def __init__(self, load_config: Any) -> None:
        options = load_config.model_loader_extra_config or {}
        if not isinstance(options, dict) or (unknown := [name for name in options if name not in _OPTIONS]):
            given = ", ".join(unknown) if isinstance(options, dict) else repr(options)
            raise InvalidArgument(f"model_loader_extra_config: ckpt has no option {given}; it has {', '.join(_OPTIONS)}")
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config={}))
        self._options = options

    def download_model(self, model_config: Any) -> None:
        """Check that the step and the part of it exist; nothing is downloaded."""
        options = self._options
        checkpoint = open_step(options.get("url"), options.get("step"))
        weight_names(checkpoint, options.get("prefix", ""), options.get("rename"))

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the names and tensors of the step; each process reads all, and its layers take their part of each."""
        return iterate_weights(**self._options)
