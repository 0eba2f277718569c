"""Steps of two ranks that older commits wrote, with values that differ by rank: they are read, and new ones are added.

tests/fixtures/write_values_of_ranks.py has written them.
"""

from __future__ import annotations

import logging
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers.folders import TESTS
from helpers.rank_threads import all_well, on_ranks

import ckpt

torch = pytest.importorskip("torch")

FIXTURES = TESTS / "fixtures"
WITH_OWN_BUFFERS, WITHOUT = "a8b669a", "a100607"


def state_of(rank: int, step: int) -> dict[str, Any]:
    found: dict[str, Any] = runpy.run_path(str(FIXTURES / "write_values_of_ranks.py"))["state_of"](rank, step)
    return found


@pytest.fixture(params=[WITH_OWN_BUFFERS, WITHOUT])
def commit(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the commit whose repository is in `tmp_path`."""
    commit: str = request.param
    with zipfile.ZipFile(FIXTURES / f"values_of_ranks_{commit}.zip") as archive:
        archive.extractall(tmp_path)
    return commit


def load(url: Path, step: int | None, size: int) -> list[dict[str, Any]]:
    """Return the state of each rank after a load in place."""
    states = [state_of(9, 9) for _ in range(size)]
    found = all_well(on_ranks(size, lambda group: ckpt.load(url, step=step, like=states[group.rank], group=group)))
    assert all(a is b for a, b in zip(states, found, strict=True))
    return states


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the different values of each entry that differs by rank; fail where the rest is not as it was saved."""
    model, views = state["model"], state["views"]
    assert all(bool((parameter == 0.5).all()) for parameter in model.parameters())
    assert torch.equal(views.rows, torch.stack([views.moving, views.still]))
    assert views.still.tolist() == [0, 0, 0]
    assert torch.equal(state["codes"].value, state["codebook"].codes)
    reader = state["reader"].value
    return {
        "norm": sorted({*model[1].running_mean.tolist(), model[1].num_batches_tracked.item()}),
        "views": views.moving.unique().tolist(),
        "codes": state["codes"].value.unique().tolist(),
        "reader": sorted({*reader["window"].tolist(), reader["position"]}),
        "seed": [state["seed"]],
    }


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_gets_its_values_back(tmp_path: Path, commit: str, size: int, step: int) -> None:
    has_own = commit == WITH_OWN_BUFFERS and size == 2
    for rank, state in enumerate(load(tmp_path, step, size)):
        first, own = [step], [10 * (rank % 2) + step]
        expected = {"norm": own if has_own else first, "views": first, "codes": own, "reader": own, "seed": own}
        assert values_of(state) == expected
        assert state["step"] == step


def test_a_warning_says_that_views_of_one_memory_come_from_rank_0(
    tmp_path: Path, commit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """a8b669a stored own values of some views of one memory, and left out those that were equal."""
    with caplog.at_level(logging.WARNING, "ckpt"):
        load(tmp_path, 2, 2)
    messages = [r.getMessage() for r in caplog.records if "shares memory with views.still" in r.getMessage()]
    assert len(messages) == (1 if commit == WITH_OWN_BUFFERS else 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_repository_continues(tmp_path: Path, commit: str, size: int) -> None:
    """New steps refer to blocks of the old ones, which are then deleted."""
    states = load(tmp_path, None, size)
    for state in states:
        state["step"] = 3
    all_well(on_ranks(size, lambda group: ckpt.save(states[group.rank], tmp_path, 3, keep=1, group=group)))
    assert ckpt.open(tmp_path).steps() == [3]
    assert ckpt.open(tmp_path)[3].verify()
    assert [values_of(state) for state in load(tmp_path, None, size)] == [values_of(state) for state in states]


def test_damage_of_an_own_value_is_found(tmp_path: Path, commit: str) -> None:
    for pack in tmp_path.glob("steps/2/pack/1-*"):
        data = bytearray(pack.read_bytes())
        pack.write_bytes(bytes(byte ^ 1 for byte in data))
    with pytest.warns(UserWarning, match="so the older step 1 was loaded"):
        states = load(tmp_path, None, 2)
    assert [state["step"] for state in states] == [1, 1]
    with pytest.raises(ckpt.IntegrityError, match="does not match its digest"):
        ckpt.open(tmp_path)[2].verify()
