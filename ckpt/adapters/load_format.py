"""The name of the load format by which vLLM and SGLang read their weights from a step. This file imports neither of them."""

from __future__ import annotations

LOAD_FORMAT = "ckpt"
