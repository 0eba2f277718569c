"""Tensors and buffers of MindSpore that are views of one memory, also where they differ by rank."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from helpers.buffer_views import BufferViewContract
from mindspore import nn

from ckpt.state.leaves.mindspore import views_have_addresses

pytestmark = pytest.mark.skipif(
    not views_have_addresses(),
    reason="MindSpore 2.7 gives no access to the memory of a view",
)


class TestMindSpore(BufferViewContract):
    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        return ms.Tensor(values).astype(getattr(ms, dtype))

    def values(self, tensor: Any) -> Any:
        return tensor.astype(ms.float32).asnumpy()

    def module(self, buffers: dict[str, Any]) -> Any:
        made = nn.Cell()
        made.train_me = ms.Parameter(ms.Tensor(np.ones(3, np.float32)), name="train_me")
        for name, buffer in buffers.items():
            made.register_buffer(name, buffer)
        return made
