"""Differences in other stores: an object store of fsspec, and a namespace with erasure codes that loses a member."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.drifting_states import assert_drifting_steps_load, base_of_weights, drifting_state, pack_step

import ckpt


def test_an_object_store_has_differences(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/run"
    for step in (1, 2, 3):
        ckpt.save(drifting_state(step), url, step, keep=2, full_every=10)
    assert pack_step(base_of_weights(url, 3).pack) == 1
    assert assert_drifting_steps_load(url, 3) == [2, 3]
    assert np.array_equal(ckpt.open(url)[3]["weights"][7:900], drifting_state(3)["weights"][7:900])


def test_a_namespace_with_erasure_codes_keeps_differences_and_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.toml"
    members = ", ".join(f"'{tmp_path}/disk{i}'" for i in range(3))
    config.write_text(f"[namespaces.lab]\nmembers = [{members}]\nredundancy = '2+1'\n")
    monkeypatch.setenv("CKPT_CONFIG", str(config))
    url = "ckpt://lab/run"
    for step in (1, 2, 3):
        ckpt.save(drifting_state(step), url, step, keep=1, full_every=10)
    assert pack_step(base_of_weights(url, 3).pack) == 1
    shutil.rmtree(tmp_path / "disk0" / "objects")
    assert assert_drifting_steps_load(url, 3) == [3]
