"""Buffers of torch modules that differ between ranks: the same ranks load their own, all others the first rank's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ckpt
from ckpt.groups.threads import ThreadGroup
from ckpt.saving import buffer_merge
from ckpt.saving.buffer_shares import OWN_BUFFER_BYTES
from ckpt.state.boxes import Replica
from ckpt.tools import inspect, restore

torch = pytest.importorskip("torch")
from ckpt.adapters.torch import ModelState  # noqa: E402

RANKS = 4
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def model(rank: int, features: int = 3) -> Any:
    """Return a model with equal parameters on each rank, and with statistics of the batches of this rank."""
    made = torch.nn.Sequential(torch.nn.Linear(4, features), torch.nn.BatchNorm1d(features))
    made.register_buffer("constant", torch.arange(5.0))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(0.5)
    for name in STATISTICS:
        getattr(made[1], name).fill_(rank + 1)
    return made


def on_ranks(work: Callable[[Any], Any], size: int = RANKS) -> list[Any]:
    """Return what `work` returns for the group of each rank."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, ThreadGroup.make(size)))


def save(url: Path, step: int = 1, wrap: Any = lambda m: m, make: Any = model, **options: Any) -> None:
    on_ranks(lambda g: ckpt.save({"model": wrap(make(g.rank))}, url, step, group=g, **options))


def loaded(url: Path, size: int = RANKS, wrap: Any = lambda m: m, make: Any = model, **options: Any) -> list[Any]:
    """Return the model of each rank after a load in place."""

    def load(group: Any) -> Any:
        made = make(9)
        ckpt.load(url, like={"model": wrap(made)}, group=group, **options)
        return made

    return on_ranks(load, size)


def statistics(made: Any) -> list[Any]:
    """Return the different values of the statistics of a model."""
    return sorted({value for name in STATISTICS for value in getattr(made[1], name).unique().tolist()})


@pytest.mark.parametrize("wrap", [lambda m: m, ModelState, lambda m: [m, {"b": 1}]], ids=["plain", "ModelState", "nested"])
@pytest.mark.parametrize("features", [3, 20_000])
def test_each_rank_gets_its_own_buffers_back(tmp_path: Path, features: int, wrap: Any) -> None:
    make = lambda rank: model(rank, features)  # noqa: E731
    save(tmp_path, wrap=wrap, make=make)
    for rank, made in enumerate(loaded(tmp_path, wrap=wrap, make=make)):
        assert statistics(made) == [rank + 1]
        assert all(bool((parameter == 0.5).all()) for parameter in made.parameters())
        assert made.constant.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [2, 5])
def test_another_number_of_ranks_gets_the_buffers_of_rank_0(tmp_path: Path, size: int) -> None:
    save(tmp_path)
    assert [statistics(made) for made in loaded(tmp_path, size)] == [[1]] * size


def test_a_load_of_one_process_gets_the_buffers_of_rank_0(tmp_path: Path) -> None:
    save(tmp_path)
    alone = model(9)
    ckpt.load(tmp_path, like={"model": alone})
    assert statistics(alone) == [1]
    whole = ckpt.load(tmp_path)["model"]
    assert all(np.unique(whole[f"1.{name}"].numpy()).tolist() == [1] for name in STATISTICS)
    assert not [name for name in whole if "@" in name]


def test_a_partial_load_gets_the_own_buffers(tmp_path: Path) -> None:
    save(tmp_path)
    assert [made[1].running_mean.unique().tolist() for made in loaded(tmp_path, only="model.1.running_mean")] == [
        [1], [2], [3], [4],
    ]  # fmt: skip


def test_a_load_under_other_names_gets_the_own_buffers(tmp_path: Path) -> None:
    save(tmp_path)

    def load(group: Any) -> list[Any]:
        made = model(9)
        ckpt.load(tmp_path, like={"renamed": made}, rename={"^renamed": "model"}, group=group)
        return statistics(made)

    assert on_ranks(load) == [[1], [2], [3], [4]]


def test_large_buffers_that_differ_are_refused_if_all_bytes_are_compared(tmp_path: Path) -> None:
    def make(rank: int) -> Any:
        made = model(rank)
        made.register_buffer("table", torch.zeros(OWN_BUFFER_BYTES // 4 + 9))
        made.table[5000] = rank  # no sample has it
        return made

    def refused(group: Any) -> None:
        with pytest.raises(ckpt.StepRefused, match="leaf model.table differs"):
            ckpt.save({"model": make(group.rank)}, tmp_path, 1, group=group, verify_replicas=True)

    on_ranks(refused)
    save(tmp_path, 2, verify_replicas=True)
    assert [statistics(made) for made in loaded(tmp_path)] == [[1], [2], [3], [4]]


def test_buffers_that_are_equal_are_listed_once(tmp_path: Path) -> None:
    """Later saves refer to the blocks of buffers that the step does not list, after older steps are deleted."""
    for step in range(4):
        save(tmp_path, step, make=lambda rank: model(7), keep=1)
    step_3 = ckpt.open(tmp_path)[3]
    assert not [name for name in step_3 if "@" in name]
    assert "own" not in json.dumps(step_3.tree())
    assert step_3.verify()
    save(tmp_path, 4, keep=1)
    found = {name for name in ckpt.open(tmp_path)[4] if "@" in name}
    assert found == {f"model.1.{name}@{rank}" for name in STATISTICS for rank in range(1, RANKS)}
    assert [statistics(made) for made in loaded(tmp_path)] == [[1], [2], [3], [4]]


def test_large_buffers_are_stored_once_and_a_warning_names_those_that_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(rank: int) -> Any:
        made = model(rank)
        made.register_buffer("table", torch.full((OWN_BUFFER_BYTES // 4,), float(rank + 1)))
        made.register_buffer("equal", torch.full((OWN_BUFFER_BYTES // 4,), 3.0))
        return made

    buffer_merge._warned_urls.clear()
    with caplog.at_level(logging.WARNING, "ckpt"):
        save(tmp_path, 1, make=make)
        save(tmp_path, 2, make=make)
    (message,) = [r.getMessage() for r in caplog.records if "buffers differ" in r.getMessage()]
    assert "model.table on ranks 1, 2, 3" in message
    assert "equal" not in message
    assert len(message) - len(str(tmp_path)) < 230
    for rank, made in enumerate(loaded(tmp_path, make=make)):
        assert statistics(made) == [rank + 1]
        assert made.table.unique().tolist() == [1]
    assert not [name for name in ckpt.open(tmp_path)[2] if name.startswith(("model.table@", "model.equal@"))]


@pytest.mark.parametrize("size", [RANKS, 2])
@pytest.mark.parametrize("module_first", [True, False])
def test_a_large_buffer_that_is_wrapped_besides_the_module_comes_back_to_its_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, module_first: bool, size: int
) -> None:
    """The wrapped array and the buffer are one memory, of which the step has the value of each rank and that of rank 0."""

    def state(rank: int) -> dict[str, Any]:
        made = model(rank)
        made.register_buffer("table", torch.full((OWN_BUFFER_BYTES // 4 + 1,), float(rank + 1)))
        found = {"model": made, "table": ckpt.PerRank(made.table)}
        return found if module_first else dict(reversed(found.items()))

    with caplog.at_level(logging.WARNING, "ckpt"):
        on_ranks(lambda g: ckpt.save(state(g.rank), tmp_path, 1, group=g))
    assert not [r.getMessage() for r in caplog.records if "buffers differ" in r.getMessage()]
    found = on_ranks(lambda g: ckpt.load(tmp_path, like=state(9), group=g)["model"].table.unique().tolist(), size)
    assert found == [[rank + 1] for rank in range(size)]


class Views(torch.nn.Module):
    """Buffers that are views of one memory. Only `moving` differs between ranks, so `still` equals that of rank 0."""

    def __init__(self, rank: int, elements: int = 4, base: str = "buffer") -> None:
        super().__init__()
        rows = torch.zeros(2, elements)
        if base == "buffer":
            self.register_buffer("rows", rows)
        elif base == "parameter":
            self.rows = torch.nn.Parameter(rows)
        for name, row in (("moving", rows[0]), ("still", rows[1]), ("second_name", rows[0])):
            self.register_buffer(name, row)
        rows[0] = 1 if base == "parameter" else rank + 1

    def values(self) -> list[float]:
        """Return the values of each row; fail where views of one memory differ."""
        assert torch.equal(self.moving, self.second_name)
        if "rows" in self._buffers:
            assert torch.equal(self.rows, torch.stack([self.moving, self.still]))
        return [*self.moving.unique().tolist(), *self.still.unique().tolist()]


@pytest.mark.parametrize("base", ["buffer", "not in the state"])
@pytest.mark.parametrize("wrap", [lambda m: m, ModelState], ids=["plain", "ModelState"])
def test_each_rank_gets_its_own_views_of_one_memory_back(tmp_path: Path, wrap: Any, base: str) -> None:
    make = lambda rank: Views(rank, base=base)  # noqa: E731
    for step in range(2):
        save(tmp_path, step, wrap=wrap, make=make, keep=1)
        assert [made.values() for made in loaded(tmp_path, wrap=wrap, make=make)] == [[rank + 1, 0] for rank in range(RANKS)]
    assert [made.values() for made in loaded(tmp_path, 2, wrap=wrap, make=make)] == [[1, 0]] * 2
    assert ckpt.open(tmp_path)[1].verify()
    save(tmp_path, 2, wrap=wrap, make=lambda rank: Views(0, base=base))
    assert not [name for name in ckpt.open(tmp_path)[2] if "@" in name]


def test_each_rank_gets_its_own_expanded_buffer_back(tmp_path: Path) -> None:
    """All elements of an expanded buffer are one element in memory."""

    def make(rank: int) -> Any:
        made = torch.nn.Module()
        made.register_buffer("scale", torch.full((1,), float(rank)).expand(5))
        return made

    save(tmp_path, make=make)
    assert [made.scale.tolist() for made in loaded(tmp_path, make=make)] == [[rank] * 5 for rank in range(RANKS)]


def test_a_part_of_the_views_of_one_memory_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, make=Views)
    for name, expected in (("moving", [[rank + 1, 0] for rank in range(RANKS)]), ("still", [[10, 0]] * RANKS)):
        assert [made.values() for made in loaded(tmp_path, make=Views, only=f"model.{name}")] == expected


def warnings_of_buffers(caplog: pytest.LogCaptureFixture, url: Path, make: Any) -> str:
    """Save on all ranks, and return the warning about buffers."""
    buffer_merge._warned_urls.clear()
    with caplog.at_level(logging.WARNING, "ckpt"):
        save(url, make=make)
    (message,) = [r.getMessage() for r in caplog.records if "buffers differ" in r.getMessage()]
    return message


def test_views_beyond_the_limit_are_stored_once_and_a_warning_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each row alone is within the limit, and all views together are beyond it."""
    make = lambda rank: Views(rank, OWN_BUFFER_BYTES // 8 - 1000)  # noqa: E731
    assert "model.moving on ranks 1, 2, 3" in warnings_of_buffers(caplog, tmp_path, make)
    assert [made.values() for made in loaded(tmp_path, make=make)] == [[1, 0]] * RANKS
    assert not [name for name in ckpt.open(tmp_path)[1] if "@" in name]


def test_a_view_of_a_parameter_is_stored_once(tmp_path: Path) -> None:
    """Ranks have equal parameters. Own values of the view alone would contradict them."""
    make = lambda rank: Views(rank, base="parameter")  # noqa: E731
    save(tmp_path, make=make)
    assert [made.values() for made in loaded(tmp_path, make=make)] == [[1, 0]] * RANKS
    assert not [name for name in ckpt.open(tmp_path)[1] if "@" in name]


def large_views(views_on: set[int]) -> Callable[[int], Any]:
    """Return a maker of views beyond the limit; on other ranks they are separate buffers, and the rows alone are within it."""

    def make(rank: int) -> Any:
        made = Views(rank, OWN_BUFFER_BYTES // 8 - 1000)
        if rank not in views_on:
            for name in ("rows", "moving", "still"):
                made.register_buffer(name, getattr(made, name).clone())
            made.register_buffer("second_name", made.moving)
        return made

    return make


def test_a_rank_without_the_views_of_rank_0_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = large_views({0})
    save(tmp_path, make=make)
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert [made.moving.unique().tolist() for made in loaded(tmp_path, make=make)] == [[1]] * RANKS
    messages = {r.getMessage() for r in caplog.records if "shares memory with" in r.getMessage()}
    assert len(messages) == 1, messages
    assert max(map(len, messages)) - len(str(tmp_path)) < 200


def test_a_warning_names_buffers_that_are_views_on_another_rank_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = warnings_of_buffers(caplog, tmp_path, large_views({2}))
    assert "model.rows on ranks 1, 2, 3, model.moving on rank 2, model.still on rank 2." in message
    assert len(message.removeprefix(f"step 1 of file://{tmp_path}: ")) < 220


def test_arrays_that_like_lacks_are_made_with_the_own_values(tmp_path: Path) -> None:
    save(tmp_path)
    made = on_ranks(lambda g: ckpt.load(tmp_path, like={"model": None}, group=g)["model"])
    assert [state["1.running_mean"].unique().tolist() for state in made] == [[1], [2], [3], [4]]


class ExpertNorm(torch.nn.Module):
    """The statistics of an expert of this rank, of which another rank has a copy; as `ModelState(experts=)` declares them."""

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:
        rank = int(self.seen)
        copies = Replica(rank // 2, 2, (rank % 2, rank % 2 + 2), True)
        return {"seen": ckpt.Shard(self.seen.reshape(1), (2,), (rank % 2,), replica=copies)}


def test_a_warning_names_parts_of_arrays_that_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(rank: int) -> Any:
        made = ExpertNorm()
        made.register_buffer("seen", torch.tensor(rank))
        return made

    buffer_merge._warned_urls.clear()
    with caplog.at_level(logging.WARNING, "ckpt"):
        save(tmp_path, 1, make=make)
    (message,) = [r.getMessage() for r in caplog.records if "buffers differ" in r.getMessage()]
    assert "model.seen at [0] on rank 2, model.seen at [1] on rank 3." in message
    assert ckpt.load(tmp_path)["model"]["seen"].tolist() == [0, 1]


class Divided(torch.nn.Module):
    """A layer whose weight is divided among the ranks by hand, as in tensor parallelism."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(rank + 1)
        self.weight = torch.ones(8 // ranks, 2)
        self.at = (rank % ranks * (8 // ranks), 0)
        self.copies = (rank // ranks, RANKS // ranks)

    def state(self) -> dict[str, Any]:
        return {"norm": self.norm, "weight": ckpt.Shard(self.weight, (8, 2), self.at, replica=self.copies)}


@pytest.mark.parametrize(("saved", "now", "expected"), [(4, 4, [1, 2, 3, 4]), (4, 2, [1] * 4), (2, 4, [1] * 4)])
def test_ranks_that_divide_arrays_in_another_way_get_equal_buffers(
    tmp_path: Path, saved: int, now: int, expected: list[int]
) -> None:
    """With tensor parallelism, ranks that share a layer must not load the different buffers of their numbers."""
    on_ranks(lambda g: ckpt.save(Divided(g.rank, saved).state(), tmp_path, 1, group=g))

    def load(group: Any) -> Any:
        made = Divided(9, now)
        made.at, made.copies = Divided(group.rank, now).at, Divided(group.rank, now).copies
        ckpt.load(tmp_path, like=made.state(), group=group)
        return made.norm.running_mean.unique().tolist()

    assert on_ranks(load) == [[value] for value in expected]


def test_a_step_whose_own_buffers_are_missing_is_damaged(tmp_path: Path) -> None:
    save(tmp_path)
    step = ckpt.open(tmp_path)[1]
    node = dict(map(tuple, dict(map(tuple, step.tree()["dict"]))["model"]["object"]["dict"]))["1.running_mean"]
    assert node["own"] == [1, 2, 3]
    names = set(step.manifest().leaves())
    step.manifest().leaves().pop("model.1.running_mean@2")
    assert names - set(step.manifest().leaves()) == {"model.1.running_mean@2"}
    with pytest.raises(ckpt.IntegrityError, match="model.1.running_mean@2 is in the tree"):
        step.require_complete()


def test_commands_list_and_export_the_buffers_of_rank_0(tmp_path: Path) -> None:
    save(tmp_path / "run")
    shown = CliRunner().invoke(inspect.command, [str(tmp_path / "run"), "1"], standalone_mode=False).output
    assert "ranks 1, 2, 3 also saved other values of model.1.running_mean, model.1.running_var" in shown, shown
    assert "@" not in shown
    listed = CliRunner().invoke(inspect.command, [str(tmp_path / "run"), "1", "--json"], standalone_mode=False).output
    assert json.loads(listed)["own_ranks"] == {f"model.1.{name}": [1, 2, 3] for name in STATISTICS}
    target = tmp_path / "model.npz"
    done = CliRunner().invoke(restore.command, [str(tmp_path / "run"), str(target)], standalone_mode=False)
    assert done.exit_code == 0, done.output
    with np.load(target) as exported:
        assert not [name for name in exported.files if "@" in name]
        assert np.unique(exported["model.1.running_mean"]).tolist() == [1]
