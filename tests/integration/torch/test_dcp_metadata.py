"""Readers of torch find the names of leaves in the DCP metadata of ckpt."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt

torch = pytest.importorskip("torch")
from ckpt.adapters.dcp import Reader  # noqa: E402


def test_dcp_metadata_names_its_step(tmp_path: Path) -> None:
    for step in (3, 4):
        ckpt.save({"w": torch.ones(4)}, tmp_path, step)
    newest = Reader(tmp_path).read_metadata().storage_meta
    assert newest is not None
    assert newest.checkpoint_id == "4"
    named = Reader(tmp_path)
    named.reset("3")
    assert named.read_metadata().storage_meta.checkpoint_id == "3"
