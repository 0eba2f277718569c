"""Values in checkpoints of Megatron that are objects are stored as plain values, and become the same objects."""

from __future__ import annotations

import argparse
import io
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from ckpt.adapters.megatron_values import decoded, encoded


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, (2, {"b": None})]},
        OrderedDict([("b", 1), ("a", OrderedDict())]),
        defaultdict(dict, {"state": defaultdict(list, {"step": [1]})}),
        Counter("aab"),
        {(0, torch.bfloat16): [torch.float32]},
        argparse.Namespace(dtype=torch.float16, counts=defaultdict(int, a=1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_decoded_as_it_was_encoded(value: Any) -> None:
    found = decoded(encoded(value, "common"))
    assert found == value
    assert isinstance(found, OrderedDict) == isinstance(value, OrderedDict)


def test_a_buffer_is_decoded_as_it_was_encoded() -> None:
    found = decoded(encoded({"b": io.BytesIO(b"bytes")}, "common"))
    assert found["b"].getvalue() == b"bytes"
