"""How a load reads a bucket: many requests at a time, since each costs a round trip."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.adapters.weights import iterate_weights
from ckpt.storage.remote.object_store import ObjectStore
from ckpt.storage.tuning import learned_choices

pytest_plugins = ["helpers.moto_server"]

ROUND_TRIP_SECONDS = 0.05


class RequestCounter:
    """Counts the range requests of all buckets, each of which takes at least a round trip over a long way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._in_flight = 0
        self.most = 0
        self.lengths: list[int] = []
        read_range = ObjectStore._read_range

        def counted(store: ObjectStore, name: str, position: int, nbytes: int) -> Any:
            with self._lock:
                self._in_flight += 1
                self.most = max(self.most, self._in_flight)
                self.lengths.append(nbytes)
            try:
                time.sleep(ROUND_TRIP_SECONDS)
                return read_range(store, name, position, nbytes)
            finally:
                with self._lock:
                    self._in_flight -= 1

        monkeypatch.setattr(ObjectStore, "_read_range", counted)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> RequestCounter:
    learned_choices.forget_tuners()
    return RequestCounter(monkeypatch)


def large_leaves() -> dict[str, Any]:
    return {f"layer.{i}": np.full(2 << 20, i, np.float32) for i in range(16)}


def small_leaves() -> dict[str, Any]:
    return {f"norm.{i}": np.full(16 << 10, i, np.float32) for i in range(1024)}


@pytest.mark.parametrize("state", [large_leaves(), small_leaves()], ids=["large leaves", "small leaves"])
def test_a_load_has_many_requests_in_flight(bucket: str, requests: RequestCounter, state: dict[str, Any]) -> None:
    ckpt.save(state, bucket, step=1, codec=None)
    found = ckpt.load(bucket)
    assert all(np.array_equal(found[name], array) for name, array in state.items())
    assert requests.most >= min(8, len(requests.lengths))
    assert sum(length > 1 << 20 for length in requests.lengths) >= 8, "short requests cost a round trip each"


def test_verifying_a_step_has_many_requests_in_flight(bucket: str, requests: RequestCounter) -> None:
    ckpt.save(large_leaves(), bucket, codec=None)
    ckpt.open(bucket).latest().verify()
    assert requests.most >= 4


def test_a_stream_of_leaves_has_many_requests_in_flight(bucket: str, requests: RequestCounter) -> None:
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(array) for name, array in large_leaves().items()}
    ckpt.save(state, bucket, step=1, codec=None)
    assert all(torch.equal(tensor, state[name]) for name, tensor in iterate_weights(bucket))
    assert requests.most >= 4


def test_a_step_whose_local_copy_is_lost_is_read_from_the_bucket_as_fast(
    bucket: str, requests: RequestCounter, tmp_path: Path
) -> None:
    state = large_leaves()
    tiers = [ckpt.Tier(str(tmp_path / "fast"))]
    with ckpt.Checkpointer(bucket, tiers=tiers) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
    for pack in (tmp_path / "fast").rglob("*.pack"):
        pack.unlink()
    requests.lengths.clear()
    like = {name: np.zeros_like(array) for name, array in state.items()}
    with ckpt.Checkpointer(bucket, tiers=tiers) as checkpointer:
        assert checkpointer.restore(like) is not None
    assert all(np.array_equal(like[name], array) for name, array in state.items())
    assert requests.most >= 8
    assert sum(length > 1 << 20 for length in requests.lengths) >= 8, "short requests cost a round trip each"
