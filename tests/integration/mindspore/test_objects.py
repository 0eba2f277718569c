"""Cells, optimizers, schedules, loss scalers, random generators and dataset iterators of MindSpore."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from helpers.refusal import refused
from mindspore import amp, nn, ops
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler

import ckpt
from ckpt.adapters.mindspore import Dropout, resumable_dropout
from ckpt.state.leaves import mindspore_objects
from ckpt.state.torch_keys import module_entries

OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "Adam": lambda p: nn.Adam(p, 0.1),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.1),
    "Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
    "SGD": lambda p: nn.SGD(p, 0.1, 0.9),
    "RMSProp": lambda p: nn.RMSProp(p, 0.1),
    "Adagrad": lambda p: nn.Adagrad(p),
    "list of rates": lambda p: nn.Momentum(p, [0.1, 0.05, 0.02, 0.01, 0.03, 0.2, 0.1, 0.1], 0.9),
    "schedule": lambda p: nn.Adam(p, nn.ExponentialDecayLR(0.1, 0.5, 2)),
    "groups": lambda p: nn.Adam([{"params": p[:1], "lr": 0.05}, {"params": p[1:]}], nn.CosineDecayLR(0.01, 0.1, 8)),
    "experimental Adam": lambda p: optim.Adam(p, 0.1),
    "experimental AdamW": lambda p: optim.AdamW([{"params": p[:1], "lr": 0.05}, {"params": p[1:]}], 0.1),
    "experimental SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9),
}


def net_of(seed: int) -> Any:
    ms.set_seed(seed)
    return nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dense(4, 2)).set_train()


def train(net: Any, optimizer: Any, steps: range) -> list[bytes]:
    """Return the bytes of the losses."""
    gradient = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
    losses = []
    for step in steps:
        loss, gradients = gradient(ms.Tensor(np.random.default_rng(step).standard_normal((5, 3)).astype(np.float32)))
        optimizer(gradients)
        losses.append(loss.asnumpy().tobytes())
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_continues_as_before(tmp_path: Path, kind: str) -> None:
    net = net_of(1)
    optimizer = OPTIMIZERS[kind](net.trainable_params())
    train(net, optimizer, range(2))
    ckpt.save({"optimizer": optimizer, "net": net}, tmp_path, 1)
    expected = train(net, optimizer, range(2, 5))
    like = net_of(2)
    fresh = OPTIMIZERS[kind](like.trainable_params())
    ckpt.load(tmp_path, like={"optimizer": fresh, "net": like})
    assert train(like, fresh, range(2, 5)) == expected
    ckpt.load(tmp_path, like={"optimizer": optimizer, "net": net})
    assert train(net, optimizer, range(2, 5)) == expected


def test_an_optimizer_is_stored_without_the_parameters_that_it_trains() -> None:
    net = net_of(1)
    names = mindspore_objects.cell_state(nn.Momentum(net.trainable_params(), 0.1, 0.9))
    assert "moments.0.weight" in names
    assert "0.weight" not in names


def test_a_cell_that_trains_another_one(tmp_path: Path) -> None:
    net = net_of(1)
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    ckpt.save({"cell": cell}, tmp_path, 0)
    leaves = ckpt.open(tmp_path)[0].leaves()
    assert len(leaves) == 8 + 6 + 3  # the net, its moments, and the optimizer's step, rate and momentum


def test_tied_parameters_are_stored_once(tmp_path: Path) -> None:
    cells = nn.CellList([nn.Dense(3, 3), nn.Dense(3, 3)])
    cells[1].weight = cells[0].weight
    ckpt.save({"m": cells}, tmp_path, 0)
    assert len(ckpt.open(tmp_path)[0].leaves()) == 3


def test_statistics_of_a_norm_count_as_buffers() -> None:
    assert module_entries(net_of(1)).buffers == ["1.moving_mean", "1.moving_variance"]


class Buffered(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", ms.Tensor([1.0, 2.0]))
        self.register_buffer("dropped", ms.Tensor([1.0]), persistent=False)


def test_buffers_of_a_cell(tmp_path: Path) -> None:
    ckpt.save({"m": Buffered()}, tmp_path, 0)
    like = Buffered()
    like.kept.asnumpy()[...] = 0
    ckpt.load(tmp_path, like={"m": like})
    assert like.kept.asnumpy().tolist() == [1.0, 2.0]
    assert [leaf.name for leaf in ckpt.open(tmp_path)[0].leaves()] == ["m.kept"]


def test_other_entries_of_a_cell_are_refused_before_anything_changes(tmp_path: Path) -> None:
    ckpt.save({"m": net_of(1)}, tmp_path, 0)
    longer = nn.SequentialCell(*net_of(2), nn.Dense(2, 2))
    shorter = nn.SequentialCell(*list(net_of(2))[:2])
    for like, words in ((longer, ("4.weight",)), (shorter, ("3.weight",))):
        before = [p.asnumpy().tobytes() for p in like.get_parameters()]
        with refused(ckpt.LeafMismatch, "leaf m", *words):
            ckpt.load(tmp_path, like={"m": like})
        assert [p.asnumpy().tobytes() for p in like.get_parameters()] == before


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    net = net_of(1)
    ckpt.save({"o": nn.Adam(net.trainable_params())}, tmp_path, 0)
    with refused(ckpt.LeafMismatch, "leaf o", "moments"):
        ckpt.load(tmp_path, like={"o": nn.Momentum(net.trainable_params(), 0.1, 0.9)})


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 6]),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, 3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_continues_as_before(tmp_path: Path, name: str) -> None:
    def made() -> tuple[Any, Any]:
        optimizer = optim.SGD(net_of(0).trainable_params(), 0.5)
        return optimizer, SCHEDULES[name](optimizer)

    def advance(schedule: Any, steps: range) -> list[float]:
        rates = []
        for step in steps:
            schedule.step(*([ms.Tensor(1.0 + step % 3)] if name == "ReduceLROnPlateau" else []))
            rates.append(float(schedule.get_last_lr()[0]))
        return rates

    optimizer, schedule = made()
    advance(schedule, range(5))
    ckpt.save({"o": optimizer, "s": schedule}, tmp_path, 0)
    other, fresh = made()
    ckpt.load(tmp_path, like={"o": other, "s": fresh})
    assert advance(fresh, range(5, 12)) == advance(schedule, range(5, 12))
    assert float(other.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])


def test_a_schedule_of_another_kind_is_refused(tmp_path: Path) -> None:
    optimizer = optim.SGD(net_of(0).trainable_params(), 0.5)
    ckpt.save({"s": SCHEDULES["StepLR"](optimizer)}, tmp_path, 0)
    with refused(ckpt.LeafMismatch, "leaf s", "step_size"):
        ckpt.load(tmp_path, like={"s": SCHEDULES["CosineAnnealingLR"](optimizer)})


def test_loss_scalers_go_on_as_before(tmp_path: Path) -> None:
    scaler, manager = amp.DynamicLossScaler(1024, 2, 3), amp.DynamicLossScaleManager(1024, 2, 3)
    for finite in (True, True, True, True, False, True):
        scaler.adjust(ms.Tensor(finite))
        manager.update_loss_scale(not finite)
    ckpt.save({"scaler": scaler, "manager": manager}, tmp_path, 0)
    like = {"scaler": amp.DynamicLossScaler(8, 2, 3), "manager": amp.DynamicLossScaleManager(8, 2, 3)}
    ckpt.load(tmp_path, like=like)
    assert float(like["scaler"].scale_value) == float(scaler.scale_value)
    assert int(like["scaler"].counter) == int(scaler.counter)
    assert vars(like["manager"]) == vars(manager)


def test_random_functions_go_on_as_before(tmp_path: Path) -> None:
    ones = ms.Tensor(np.ones((2, 6), np.float32))
    functions = (
        lambda: ops.dropout(ones, 0.5),
        lambda: ops.rand(3),
        lambda: ops.randn(3),
        lambda: ops.normal((3,), ms.Tensor(0.0), ms.Tensor(1.0)),
        lambda: ops.randint(0, 99, (3,)),
        lambda: ops.dropout(ones, 0.5, seed=5),
    )

    def draw() -> list[Any]:
        return [function().asnumpy().tolist() for function in functions]

    ms.set_seed(5)
    draw()
    ckpt.save({"random": ckpt.RandomState()}, tmp_path, 0)
    expected = [draw(), draw()]
    ms.set_seed(6)
    ckpt.load(tmp_path, like={"random": ckpt.RandomState()})
    assert ms.get_seed() == 5
    assert [draw(), draw()] == expected


def test_a_generator_continues_as_before(tmp_path: Path) -> None:
    generator = ms.Generator().manual_seed(5)
    generator._step(ms.Tensor(12, ms.int64))
    ckpt.save({"g": generator}, tmp_path, 0)
    other = ms.Generator().manual_seed(6)
    ckpt.load(tmp_path, like={"g": other})
    assert other.initial_seed() == 5
    assert other.get_state().asnumpy().tolist() == generator.get_state().asnumpy().tolist()


def iterator_of(epochs: int, seed: int = 3) -> Any:
    ms.set_seed(seed)
    data = ds.NumpySlicesDataset({"x": np.arange(12, dtype=np.float32)}, shuffle=True).batch(3)
    return data.create_dict_iterator(num_epochs=epochs)


def take(iterator: Any, count: int) -> list[list[float]]:
    found = [(next(iterator, None) or next(iterator))["x"].asnumpy().tolist() for _ in range(count)]
    return [[float(value) for value in batch] for batch in found]


@pytest.mark.parametrize("epochs", [3, -1], ids=["epochs", "endless"])
@pytest.mark.parametrize("count", [0, 3, 4, 6])
def test_a_dataset_iterator_continues_where_it_was(tmp_path: Path, epochs: int, count: int) -> None:
    iterator = iterator_of(epochs)
    take(iterator, count)
    ckpt.save({"data": iterator}, tmp_path, 0)
    expected = take(iterator, 5)
    fresh = iterator_of(epochs)
    ckpt.load(tmp_path, like={"data": fresh})
    assert take(fresh, 5) == expected
    if epochs > 0:
        with refused(ckpt.LeafMismatch, "leaf data", "create it anew"):
            ckpt.load(tmp_path, like={"data": fresh})


def test_an_iterator_at_its_end(tmp_path: Path) -> None:
    iterator = iterator_of(2)
    take(iterator, 8)
    ckpt.save({"data": iterator}, tmp_path, 0)
    fresh = iterator_of(2)
    ckpt.load(tmp_path, like={"data": fresh})
    assert next(fresh, None) is None


def test_an_iterator_of_another_order_is_refused(tmp_path: Path) -> None:
    ckpt.save({"data": iterator_of(2)}, tmp_path, 0)
    with refused(ckpt.LeafMismatch, "leaf data", "seed", "set_seed(3)"):
        ckpt.load(tmp_path, like={"data": iterator_of(2, 4)})
    ds.config.set_seed(mindspore_objects._NO_SEED)
    iterator = ds.NumpySlicesDataset([1, 2, 3]).create_tuple_iterator(num_epochs=1)
    with refused(ckpt.UnsupportedLeaf, "leaf data", "set_seed()"):
        ckpt.save({"data": iterator}, tmp_path, 1)


def test_dropout_is_replaced_by_one_that_resumes(tmp_path: Path) -> None:
    ms.set_seed(3)
    ones = ms.Tensor(np.ones((100, 100), np.float32))
    net = resumable_dropout(nn.SequentialCell(nn.Dropout(p=0.2), nn.CellList([nn.Dropout(p=0.0)])).set_train())
    assert isinstance(net[0], Dropout)
    assert isinstance(net[1][0], Dropout)
    first, second = net[0](ones).asnumpy(), net[0](ones).asnumpy()
    assert (first != second).any()
    assert np.unique(first).tolist() == [0.0, 1.25]
    assert abs((first == 0).mean() - 0.2) < 0.02
    ckpt.save({"net": net}, tmp_path, 0)
    expected = net[0](ones).asnumpy()
    ckpt.load(tmp_path, like={"net": net})
    assert (net[0](ones).asnumpy() == expected).all()
    net.set_train(False)
    assert (net[0](ones).asnumpy() == 1).all()


def test_dropout_of_mindspore_is_reported_once(tmp_path: Path) -> None:
    mindspore_objects._warned.clear()
    net = nn.SequentialCell(nn.Dense(2, 2), nn.Dropout(p=0.5)).set_train()
    with pytest.warns(UserWarning, match=r"masks of 1 .*resumable_dropout"):
        ckpt.save({"net": net}, tmp_path, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.save({"net": net}, tmp_path, 1)


@pytest.mark.parametrize("wrong", [nn.Dropout(p=0.5), 3])
def test_what_has_no_dropouts_is_refused(wrong: Any) -> None:
    with refused(ckpt.InvalidArgument, "resumable_dropout"):
        resumable_dropout(wrong)
    with refused(ckpt.InvalidArgument, "p must be"):
        Dropout(1.0)


def test_importing_ckpt_does_not_import_mindspore() -> None:
    code = "import sys, ckpt, numpy; ckpt.RandomState().state_dict(); assert 'mindspore' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
