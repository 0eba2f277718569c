"""The load format `ckpt` of SGLang: a server reads its weights from a step, without an export.

    sglang serve --model-path my-config --load-format ckpt --model-loader-extra-config '{"url": "run", "prefix": "model"}'

SGLang calls `register` through the entry point `sglang.srt.plugins` in each of its processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ckpt.adapters.load_format import LOAD_FORMAT

_CHECK = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"


def register() -> None:
    """Register the load format with SGLang."""
    if LOAD_FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([LOAD_FORMAT])
        HookRegistry.register(_CHECK, _replace_by_loader, HookType.AROUND)


def _replace_by_loader(check: Callable[[Any], None], config: Any) -> None:
    """Replace the name `ckpt` by the class of its loader, which SGLang takes in place of a name; check other names."""
    if isinstance(config.load_format, str) and config.load_format.lower() == LOAD_FORMAT:
        from ckpt.adapters.sglang_loader import SglangStepLoader  # SGLang can't import its loaders while it reads its plugins

        config.load_format = SglangStepLoader
    else:
        check(config)
