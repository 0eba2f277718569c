"""What SGLang needs on a CPU without the packages that need an accelerator."""

from __future__ import annotations

import torch


def declare_operators() -> None:
    """Declare operators of torchvision, before it is imported. They are built for CUDA, and nothing here calls them."""
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def use_native_rotary() -> None:
    """Let rotary embeddings be computed by torch. Without an accelerator, SGLang would take a kernel of vLLM."""
    import sglang.srt.layers.rotary_embedding.base as rotary

    rotary._is_cpu = True
