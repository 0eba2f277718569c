"""Random generators: those of numpy that spawn others, and the global ones of devices that this machine does not have.

Modules of torch stand for the devices.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ckpt

torch = pytest.importorskip("torch")


class Device(SimpleNamespace):
    """A module such as torch.xpu, with two devices. The state of each is one number."""

    def __init__(self, is_initialized: bool = True) -> None:
        super().__init__(is_available=lambda: True, is_initialized=lambda: is_initialized, device_count=lambda: 2)
        self.states = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]
        self.get_rng_state_all = lambda: [state.clone() for state in self.states]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.states = list(states)


@pytest.mark.parametrize("name", ["xpu", "npu"])
def test_generators_of_other_devices_are_saved_and_set(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    device = Device()
    monkeypatch.setattr(torch, name, device, raising=False)
    saved = ckpt.RandomState().state_dict()
    device.states = [torch.tensor([8], dtype=torch.uint8)] * 2
    ckpt.RandomState().load_state_dict(saved)
    assert [int(state) for state in device.states] == [1, 2]


def test_a_device_that_the_process_has_not_used_is_not_initialized_by_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "xpu", Device(is_initialized=False))
    assert "xpu" not in ckpt.RandomState().state_dict()


def test_the_generator_of_mps_is_saved_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([1], dtype=torch.uint8)]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    saved = ckpt.RandomState().state_dict()
    ckpt.RandomState().load_state_dict(saved)
    assert [int(state) for state in states] == [1, 1]


SEED = [2**70, 3]


replaces_seed_sequence = pytest.mark.skipif(
    np.__version__.startswith("1."), reason="numpy 1 can't replace the seed sequence of a generator"
)


@replaces_seed_sequence
@pytest.mark.parametrize(("seed", "spawned_before"), [(SEED, 0), (SEED, 1), (SEED, 9), (5, 0)])
@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937])
def test_a_restored_generator_spawns_no_generator_again(tmp_path: Path, kind: Any, seed: Any, spawned_before: int) -> None:
    generator = np.random.Generator(kind(SEED))
    generator.spawn(2)
    ckpt.save({"rng": generator}, tmp_path)
    expected = [child.random() for child in generator.spawn(2)]
    resumed = np.random.Generator(kind(seed))
    resumed.spawn(spawned_before)
    ckpt.load(tmp_path, like={"rng": resumed})
    assert [child.random() for child in resumed.spawn(2)] == expected
    assert resumed.random() == generator.random()


SEEDS = [
    None, 5, np.int64(5), ["0x123"], range(3), np.arange(3), [np.arange(3), (4, 2**40)],
    np.random.SeedSequence(5, spawn_key=(2,)),
]  # fmt: skip


@replaces_seed_sequence
@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_a_restored_generator_spawns_the_first_generators_that_the_saved_one_spawns(tmp_path: Path, seed: Any) -> None:
    generator, resumed = np.random.default_rng(seed), np.random.default_rng()
    ckpt.save({"rng": generator}, tmp_path)
    ckpt.load(tmp_path, like={"rng": resumed})
    assert [child.random() for child in resumed.spawn(2)] == [child.random() for child in generator.spawn(2)]
    assert resumed.random() == generator.random()


def test_a_generator_without_a_seed_sequence_of_numpy_is_restored(tmp_path: Path) -> None:
    class Source(np.random.bit_generator.ISeedSequence):
        def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
            return np.arange(n_words, dtype=dtype)

    generator, resumed = np.random.Generator(np.random.PCG64(Source())), np.random.default_rng()
    ckpt.save({"rng": generator}, tmp_path)
    ckpt.load(tmp_path, like={"rng": resumed})
    assert resumed.random() == generator.random()
