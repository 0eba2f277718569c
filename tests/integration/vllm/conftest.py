"""The tests of vLLM need packages of one build."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        raise pytest.UsageError(
            f"torchvision is of another build than torch ({error}): pip uninstall torchvision torchaudio torchcodec, or "
            "install them from the same index as torch"
        ) from error
