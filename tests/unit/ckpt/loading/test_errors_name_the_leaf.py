"""Errors about data of a newer version name the leaf and the step, and say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.format import codec
from ckpt.format.manifest import Saved
from ckpt.loading.target_matching import TargetMatcher


def matcher(dtype: str) -> TargetMatcher:
    return TargetMatcher({"w": Saved(dtype, (2,))}, None, "step 3 of run", lambda: {"w": 2.0})


def test_an_unknown_element_type() -> None:
    with pytest.raises(
        ckpt.FormatError, match="leaf w of step 3 of run: unknown element type 'later8': install a newer ckpt-store"
    ):
        matcher("later8").rebuild({"array": "w", "kind": "numpy"})


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"later": 1}, r"an unknown kind \(later\): install a newer ckpt-store"),
        ({"dict": [[[{"array": "w", "kind": "numpy"}], 1]]}, "an array where a plain value belongs; restore the file"),
        ({"scalar": "AAAA", "dtype": "float64"}, "a float64 of 3 bytes; restore the file"),
        (1j, "not a node: 1j; restore the file"),
    ],
)
def test_a_tree_that_this_version_does_not_know(node: Any, text: str) -> None:
    with pytest.raises(ckpt.FormatError, match=f"^step 3 of run: the tree file has .*{text}"):
        matcher("int8").rebuild(node)


def test_a_codec_that_this_version_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save({"w": np.zeros(1000)}, tmp_path, 1, codec={"id": "zstd"})
    monkeypatch.setattr(codec, "_SAFE_CODEC_IDS", codec._SAFE_CODEC_IDS - {"zstd"})  # as in a version without it
    codec.codec_of.cache_clear()
    with pytest.raises(ckpt.FormatError, match="leaf w of step 1 of .* can't be decoded .*install a newer ckpt-store"):
        ckpt.load(tmp_path)
