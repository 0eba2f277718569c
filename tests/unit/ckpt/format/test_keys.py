"""The option `key=`: bytes of any kind, or the path of a key file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt

KEY = bytes(range(32))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_key_is_bytes_of_any_kind(kind: Any, tmp_path: Path) -> None:
    ckpt.save({"x": np.ones(2)}, tmp_path, key=kind(KEY))
    assert ckpt.load(tmp_path, key=kind(KEY))["x"].tolist() == [1, 1]
    with pytest.raises(ckpt.InvalidArgument, match="at least 32 bytes"):
        ckpt.load(tmp_path, key=kind(KEY[1:]))


@pytest.mark.parametrize("key", [5, ["a"], KEY.decode().split(" ")])
def test_a_key_of_another_type_is_refused(key: Any, tmp_path: Path) -> None:
    with pytest.raises(ckpt.InvalidArgument, match="key= is a (int|list); give the path of a key file, or the key as bytes"):
        ckpt.save({"x": np.ones(2)}, tmp_path, key=key)
