"""Buffers of Paddle layers that are views of one memory, and that differ by rank."""

from __future__ import annotations

from typing import Any

import paddle
from helpers.buffer_views import BufferViewContract


class TestPaddle(BufferViewContract):
    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        return paddle.to_tensor(values, place=paddle.CPUPlace()).astype(dtype)

    def values(self, tensor: Any) -> Any:
        return tensor.astype("float32").numpy()

    def module(self, buffers: dict[str, Any]) -> Any:
        made = paddle.nn.Linear(2, 2, weight_attr=paddle.nn.initializer.Constant(0.5))
        for name, buffer in buffers.items():
            made.register_buffer(name, buffer)
        return made
