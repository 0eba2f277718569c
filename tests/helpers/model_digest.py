"""A digest of the parameters of a torch model, which two processes can compare."""

from __future__ import annotations

import hashlib

import torch


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        found.update(name.encode())
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
