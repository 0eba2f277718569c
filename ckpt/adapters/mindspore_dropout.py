"""Dropout for MindSpore that a resumed training run repeats: `resumable_dropout(net)` of ckpt.adapters.mindspore.

`nn.Dropout` draws from numbers that its kernel counts by itself, which nothing can read or set. The cell here computes its mask
from a seed and the number of its calls. Both are in a parameter, which is saved with the net.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ckpt.errors import InvalidArgument

_BITS = 1 << 32


def _mix(x: Any) -> Any:
    """Return a 32-bit hash of each element (lowbias32 of Chris Wellons). It is computed in int64, whose products wrap."""
    x = _low_bits(ops.bitwise_xor(x, ops.bitwise_right_shift(x, ms.Tensor(16, ms.int64))) * 0x7FEB352D)
    x = _low_bits(ops.bitwise_xor(x, ops.bitwise_right_shift(x, ms.Tensor(15, ms.int64))) * 0x846CA68B)
    return ops.bitwise_xor(x, ops.bitwise_right_shift(x, ms.Tensor(16, ms.int64)))


def _low_bits(x: Any) -> Any:
    return ops.bitwise_and(x, ms.Tensor(0xFFFFFFFF, ms.int64))


@ms.jit  # type: ignore[untyped-decorator]  # in PyNative mode, too: as single operations it takes ten times as long
def _kept(position: Any, size: int, limit: int) -> Any:
    """Return which of `size` elements are kept; position: the seed and the number of the call."""
    key = _mix(position)
    bits = _mix(ops.bitwise_xor(_mix(ops.arange(size) + key[0]), key[1]))
    return ops.greater_equal(bits, limit)


class Dropout(nn.Cell):  # type: ignore[misc]
    """Dropout whose masks follow from a seed and the number of calls, in PyNative and graph mode, on any device.

    p: the probability that an element becomes zero.
    seed: dropouts with different seeds have different masks.
    """

    def __init__(self, p: float = 0.5, seed: int = 0) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise InvalidArgument(f"Dropout: p must be at least 0 and less than 1, not {p!r}")
        self.p = float(p)
        self.position = ms.Parameter(ms.Tensor([seed, 0], ms.int64), name="position", requires_grad=False)
        self._one_call = ms.Tensor([0, 1], ms.int64)
        self._limit = int(p * _BITS)

    def construct(self, x: Any) -> Any:
        """Return `x` with elements set to zero and the others scaled, in training; else `x`."""
        if not self.training or self.p == 0:
            return x
        position = self.position + self._one_call
        ops.assign(self.position, position)
        kept = _kept(position, x.size, self._limit).reshape(x.shape)
        return x * kept.astype(x.dtype) * (1 / (1 - self.p))


def resumable_dropout(net: Any, seed: int | None = None) -> Any:
    """Replace each nn.Dropout of a net by a Dropout whose masks a resumed training run repeats; return the net.

    Call it before the first step, and before the optimizer is created.

    seed: of the masks; None takes that of mindspore.set_seed().

    Raises InvalidArgument for a net that is not a cell, or is a dropout itself.
    """
    if not isinstance(net, nn.Cell) or type(net) is nn.Dropout:
        raise InvalidArgument(f"resumable_dropout: give the net that contains the dropouts, not a {type(net).__name__}")
    number = int(ms.get_seed() or 0) if seed is None else seed
    for prefix, parent in list(net.cells_and_names()):
        for name, child in list(parent._cells.items()):
            if type(child) is not nn.Dropout:
                continue
            number += 1
            made = Dropout(child.p if child.p is not None else 1 - child.keep_prob, number)
            made.position.name = f"{prefix}.{name}.position" if prefix else f"{name}.position"
            made.set_train(child.training)
            parent._cells[name] = made
            if hasattr(parent, "cell_list"):  # a SequentialCell keeps its cells a second time
                parent.cell_list = list(parent._cells.values())
    return net
