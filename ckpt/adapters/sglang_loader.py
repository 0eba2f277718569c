"""The loader of the load format `ckpt` of SGLang."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.load_config import _DEFAULT_LOAD_GROUP
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel

from ckpt.adapters.served_step import ServedStep
from ckpt.errors import LeafNotFound
from ckpt.storage.base.errors import InvalidArgument

_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Weights that SGLang merges into one, for models that have no list of them."""


@dataclass(frozen=True)
class _Loaded:
    """What a model of this process has: the options of its start, and the step with its names of weights."""

    options: ServedStep
    step: ServedStep
    names: frozenset[str]


class SglangStepLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads the weights of a step; everything else is done as SGLang does it for safetensors.

    `model_loader_extra_config` has the options of `ServedStep`. The key file is that in CKPT_KEY_FILE.

    `update_weights_from_disk` has no options: it makes a new loader, which takes those of the start. If the new weights fail,
    SGLang asks for weights again, and gets those of the step that the model had.
    """

    _models: dict[str, _Loaded] = {}
    """By the path of the model; all loaders of the process share it. No lock guards it, because entries are only added or
    replaced."""

    def __init__(self, load_config: Any) -> None:
        self._options = ServedStep.from_options(load_config.model_loader_extra_config or {})
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config={}))
        self._next: list[_Loaded] | None = None
        self._start: _Loaded | None = None

    def download_model(self, model_config: Any) -> None:
        """Check that the step and the part of it exist; nothing is downloaded."""
        self._options.names()

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """Load a model. All ranks load the same step, also if another step is saved meanwhile."""
        if getattr(model_config, "modelopt_quant", None):
            raise InvalidArgument("the load format ckpt can't load a model for ModelOpt quantization: export the step first")
        self._start = self._find(self._options)
        self._next = [self._start]
        return super().load_model(model_config=model_config, device_config=device_config)

    def _get_weights_iterator(self, source: Any, *args: Any, **further: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the names and tensors of the step; each process reads all, and its layers take their part of each."""
        path = source.model_or_path
        if self._next is None:
            self._next = self._steps_of_update(path)
        if not self._next:
            raise InvalidArgument(
                f"this model has weights of a second source, {path}, and the load format ckpt has only one: export the "
                "step first"
            )
        loaded = self._models[path] = self._next.pop(0)
        tensors = loaded.step.tensors()
        if self.load_config.draft_model_idx is None:
            return tensors
        found: Iterator[tuple[str, torch.Tensor]] = self._filter_mtp_weights(tensors, "", self.load_config.draft_model_idx)
        return found

    def _steps_of_update(self, path: str) -> list[_Loaded]:
        """Return the step to load and, in case that it fails, the one that the model has."""
        if path not in self._models:
            known = ", ".join(self._models)
            raise InvalidArgument(
                f"model_path={path!r}: give {known}, the path with which the server started; ckpt loads from its url"
            )
        now = self._models[path]
        new = self._find(now.options)
        if (missing := now.names - new.names) and now.options.strict:
            raise LeafNotFound(
                f"step {new.step.step} lacks {len(missing)} weights of step {now.step.step}, such as {sorted(missing)[0]}: "
                "save all weights in each step, or set strict to false"
            )
        return [new, now]

    def _find(self, options: ServedStep) -> _Loaded:
        """Return the step that the first rank finds."""
        group = self.load_config.load_group
        if group is _DEFAULT_LOAD_GROUP:
            group = get_parallel().world_group if torch.distributed.is_initialized() else None
        step = options.with_number(group)
        return _Loaded(options, step, frozenset(step.names()))

    def load_weights_and_postprocess(
        self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], target_device: torch.device
    ) -> None:
        """Load the weights. Raise LeafNotFound at the start if one is missing, which SGLang itself does not notice."""
        with _recorded_loads(model) as loaded:
            self.load_weights_only(model, weights, target_device)
        if self._start is not None:
            missing = [name for name, _ in model.named_parameters() if name not in loaded]
            self._options.require(missing + _missing_parts(model, self._start.names))
        self.postprocess_weights(model, target_device)


def _missing_parts(model: torch.nn.Module, names: Set[str]) -> list[str]:
    """Return the missing names of groups of weights that SGLang merges into one, where other names of the group exist."""
    packed = {**_PACKED, **getattr(model, "packed_modules_mapping", {})}
    found = []
    for name, _ in model.named_parameters():
        parent, _, child = name.removesuffix(".weight").rpartition(".")
        parts = [f"{parent}.{part}.weight" for part in packed.get(child, ())] if name.endswith(".weight") else []
        absent = [each for each in parts if each not in names]
        found += absent if len(absent) < len(parts) else []
    return found


@contextmanager
def _recorded_loads(model: torch.nn.Module) -> Iterator[set[str]]:
    """Record the names of the parameters whose loader is called. SGLang's models do not return them."""
    loaded: set[str] = set()
    replaced: list[tuple[torch.nn.Parameter, str, Callable[..., Any] | None]] = []
    for name, parameter in model.named_parameters():
        attribute = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
        original = getattr(parameter, attribute, None)
        setattr(parameter, attribute, _recording(original or default_weight_loader, name, loaded))
        replaced.append((parameter, attribute, original))
    try:
        yield loaded
    finally:
        for parameter, attribute, original in replaced:
            if original is None:
                delattr(parameter, attribute)
            else:
                setattr(parameter, attribute, original)


def _recording(load: Callable[..., Any], name: str, loaded: set[str]) -> Callable[..., Any]:
    @functools.wraps(load)
    def recording(*args: Any, **further: Any) -> Any:
        loaded.add(name)
        return load(*args, **further)

    return recording
