"""Layers, optimizers, schedules, scalers and random generators of Paddle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.refusal import refused
from paddle.optimizer import lr

import ckpt
from ckpt.state.leaves import paddle_optimizer
from ckpt.state.leaves.paddle import PaddleLeaf

pytestmark = pytest.mark.essential


def _simple(name: str) -> Callable[[list[Any]], Any]:
    return lambda parameters: getattr(paddle.optimizer, name)(learning_rate=0.01, parameters=parameters)


SIMPLE = ("Adam", "AdamW", "SGD", "Momentum", "RMSProp", "Adadelta", "Adamax", "Lamb", "NAdam", "RAdam", "Rprop")
OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    **{name: _simple(name) for name in SIMPLE},
    "Adagrad": lambda parameters: paddle.optimizer.Adagrad(0.01, parameters=parameters),
    "ASGD": lambda parameters: paddle.optimizer.ASGD(0.01, batch_num=3, parameters=parameters),
    "amsgrad": lambda parameters: paddle.optimizer.Adam(0.01, parameters=parameters, amsgrad=True),
    "named": lambda parameters: paddle.optimizer.Adam(0.01, parameters=parameters, name="mine"),
    "groups": lambda parameters: paddle.optimizer.AdamW(
        0.01, parameters=[{"params": parameters[:1], "learning_rate": 0.1}, {"params": parameters[1:], "weight_decay": 0.5}]
    ),
    "several tensors": lambda parameters: paddle.optimizer.Momentum(0.01, 0.9, parameters, use_multi_tensor=True),
}


def layer_of(seed: int) -> Any:
    paddle.seed(seed)
    return paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 2))


def train(layer: Any, optimizer: Any, steps: range) -> list[bytes]:
    """Return the bytes of the losses."""
    losses = []
    for step in steps:
        x = paddle.to_tensor(np.random.default_rng(step).standard_normal((5, 3), np.float32))
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.numpy().tobytes())
    return losses


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_continues_as_before(tmp_path: Path, kind: str, stepped: bool) -> None:
    """Also one that has made no step, in a process whose counters of names differ."""
    layer = layer_of(1)
    optimizer = OPTIMIZERS[kind](layer.parameters())
    train(layer, optimizer, range(4))
    ckpt.save({"optimizer": optimizer, "layer": layer}, tmp_path, 3)
    expected = train(layer, optimizer, range(4, 9))
    like = layer_of(2)
    fresh = OPTIMIZERS[kind](like.parameters())
    if stepped:
        train(like, fresh, range(2))
    ckpt.load(tmp_path, like={"optimizer": fresh, "layer": like})
    assert train(like, fresh, range(4, 9)) == expected


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS.keys() - {"several tensors"}))
def test_a_step_before_the_first_one_resets_the_optimizer(tmp_path: Path, kind: str) -> None:
    layer = layer_of(1)
    optimizer = OPTIMIZERS[kind](layer.parameters())
    ckpt.save({"optimizer": optimizer, "layer": layer}, tmp_path, 0)
    expected = train(layer, optimizer, range(3))
    train(layer, optimizer, range(3, 6))
    ckpt.load(tmp_path, like={"optimizer": optimizer, "layer": layer})
    assert train(layer, optimizer, range(3)) == expected


def test_master_weights_and_moments_in_float32(tmp_path: Path) -> None:
    """On the host no kernel steps with them, so they are created and set by hand."""

    def made(value: float) -> tuple[Any, Any]:
        parameter = paddle.base.framework.EagerParamBase.from_tensor(paddle.full([3], value).astype("bfloat16"), trainable=True)
        return parameter, paddle.optimizer.AdamW(0.1, parameters=[parameter], multi_precision=True)

    parameter, optimizer = made(1.0)
    with paddle.no_grad():
        paddle_optimizer.create_accumulators(optimizer, parameter)
    state = paddle_optimizer.accumulators_of(optimizer, parameter)
    assert {"moment1", "moment2", "beta1_pow_acc", "master_weight"} <= state.keys()
    for number, tensor in enumerate(state.values()):
        tensor.copy_(paddle.full(tensor.shape, 1 / (number + 3)), True)
    ckpt.save({"optimizer": optimizer, "w": parameter}, tmp_path, 0)
    other, fresh = made(5.0)
    ckpt.load(tmp_path, like={"optimizer": fresh, "w": other})
    loaded = paddle_optimizer.accumulators_of(fresh, other)
    assert loaded.keys() == state.keys()
    for key, tensor in state.items():
        assert PaddleLeaf(loaded[key]).flat.tobytes() == PaddleLeaf(tensor).flat.tobytes()
    assert fresh._master_weights[other.name] is loaded["master_weight"]


def test_a_state_that_paddle_has_loaded_for_the_first_step_is_saved(tmp_path: Path) -> None:
    layer = layer_of(1)
    optimizer = OPTIMIZERS["Adam"](layer.parameters())
    train(layer, optimizer, range(2))
    by_paddle = {k: v.clone() if isinstance(v, paddle.Tensor) else v for k, v in optimizer.state_dict().items()}
    names = {parameter.name for parameter in layer.parameters()}
    again = OPTIMIZERS["Adam"](layer.parameters())
    paddle.save(by_paddle, str(tmp_path / "adam.pdopt"))
    holder = dict(paddle.load(str(tmp_path / "adam.pdopt")))
    with paddle.utils.unique_name.guard():
        again.set_state_dict(holder)
        state = again.state_dict()
        assert any(key.startswith(tuple(names)) for key in state)
        ckpt.save({"optimizer": again}, tmp_path / "run", 0)
    entry = ckpt.load(tmp_path / "run")["optimizer"]["state"][0]["moment1"]
    assert entry.numpy().tolist() == optimizer._accumulators["moment1"][layer.parameters()[0].name].numpy().tolist()


def test_lbfgs_continues_as_before(tmp_path: Path) -> None:
    def run(layer: Any, optimizer: Any, count: int) -> list[float]:
        x = paddle.to_tensor(np.random.default_rng(0).standard_normal((5, 3), np.float32))

        def closure() -> Any:
            optimizer.clear_grad()
            loss = (layer(x) - 1).square().mean()
            loss.backward()
            return loss

        return [float(optimizer.step(closure)) for _ in range(count)]

    layer = layer_of(1)
    optimizer = paddle.optimizer.LBFGS(0.1, max_iter=2, parameters=layer.parameters())
    run(layer, optimizer, 3)
    ckpt.save({"layer": layer, "optimizer": optimizer}, tmp_path, 0)
    expected = run(layer, optimizer, 3)
    like = layer_of(2)
    fresh = paddle.optimizer.LBFGS(0.1, max_iter=2, parameters=like.parameters())
    ckpt.load(tmp_path, like={"layer": like, "optimizer": fresh})
    assert run(like, fresh, 3) == expected


SCHEDULES: dict[str, Callable[[], Any]] = {
    "NoamDecay": lambda: lr.NoamDecay(10, 4),
    "PiecewiseDecay": lambda: lr.PiecewiseDecay([3, 6], [0.1, 0.2, 0.3]),
    "NaturalExpDecay": lambda: lr.NaturalExpDecay(0.5, 0.1),
    "InverseTimeDecay": lambda: lr.InverseTimeDecay(0.5, 0.1),
    "PolynomialDecay": lambda: lr.PolynomialDecay(0.5, 5, cycle=True),
    "LinearWarmup": lambda: lr.LinearWarmup(lr.CosineAnnealingDecay(0.5, 4), 3, 0.0, 0.5),
    "ExponentialDecay": lambda: lr.ExponentialDecay(0.5, 0.9),
    "MultiStepDecay": lambda: lr.MultiStepDecay(0.5, [2, 6]),
    "StepDecay": lambda: lr.StepDecay(0.5, 3),
    "LambdaDecay": lambda: lr.LambdaDecay(0.5, lambda epoch: 0.95**epoch),
    "ReduceOnPlateau": lambda: lr.ReduceOnPlateau(0.5, patience=1, cooldown=1),
    "CosineAnnealingDecay": lambda: lr.CosineAnnealingDecay(0.5, 4),
    "MultiplicativeDecay": lambda: lr.MultiplicativeDecay(0.5, lambda epoch: 0.95),
    "OneCycleLR": lambda: lr.OneCycleLR(0.5, 30),
    "CyclicLR": lambda: lr.CyclicLR(0.1, 0.5, 3),
    "LinearLR": lambda: lr.LinearLR(0.5, 9),
    "CosineAnnealingWarmRestarts": lambda: lr.CosineAnnealingWarmRestarts(0.5, 2, 2),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in an optimizer"])
def test_every_schedule_continues_as_before(tmp_path: Path, name: str, alone: bool) -> None:
    parameters = layer_of(0).parameters()

    def holder(schedule: Any) -> Any:
        return schedule if alone else paddle.optimizer.SGD(schedule, parameters)

    def advance(schedule: Any, steps: range) -> list[float]:
        rates = []
        for step in steps:
            schedule.step(*([1.0 + step % 3] if name == "ReduceOnPlateau" else []))
            rates.append(schedule())
        return rates

    schedule = SCHEDULES[name]()
    advance(schedule, range(5))
    ckpt.save({"s": holder(schedule)}, tmp_path, 0)
    fresh = SCHEDULES[name]()
    ckpt.load(tmp_path, like={"s": holder(fresh)})
    assert fresh() == schedule()
    assert advance(fresh, range(5, 20)) == advance(schedule, range(5, 20))


def test_a_changed_learning_rate_comes_back(tmp_path: Path) -> None:
    parameters = layer_of(0).parameters()
    optimizer = paddle.optimizer.SGD(0.1, parameters)
    optimizer.set_lr(0.025)
    ckpt.save({"o": optimizer}, tmp_path, 0)
    fresh = paddle.optimizer.SGD(0.1, parameters)
    ckpt.load(tmp_path, like={"o": fresh})
    assert fresh.get_lr() == 0.025
    with refused(ckpt.LeafMismatch, "leaf o", "schedule", "fixed learning rate"):
        ckpt.load(tmp_path, like={"o": paddle.optimizer.SGD(lr.StepDecay(0.1, 2), parameters)})


def test_the_scaler_comes_back(tmp_path: Path) -> None:
    """Paddle turns scalers off on the host: one that is off has no state, and these are turned on by hand."""

    def scaler(scale: float, count: int) -> Any:
        made = paddle.amp.GradScaler()
        made._enable, made._scale, made._use_dynamic_loss_scaling = True, paddle.to_tensor([scale]), True
        made._incr_ratio, made._decr_ratio, made._incr_every_n_steps, made._decr_every_n_nan_or_inf = 2.0, 0.5, 10, 2
        made._incr_count, made._decr_count = count, 1
        return made

    off = paddle.amp.GradScaler()
    ckpt.save({"scaler": scaler(32.0, 5), "off": off}, tmp_path, 0)
    fresh = scaler(1.0, 0)
    ckpt.load(tmp_path, like={"scaler": fresh, "off": off})
    assert fresh._scale.tolist() == [32.0]
    assert fresh._incr_count == 5
    with refused(ckpt.LeafMismatch, "leaf off", "disabled"):
        ckpt.load(tmp_path, like={"off": fresh})


def test_random_numbers_go_on_as_before(tmp_path: Path) -> None:
    tracker = paddle.distributed.fleet.meta_parallel.get_rng_state_tracker()
    tracker.reset()
    tracker.add("global_seed", 100)
    paddle.seed(5)
    generator = paddle.framework.core.default_cpu_generator()

    def draw() -> list[Any]:
        with tracker.rng_state("global_seed"):
            inner = paddle.rand([3]).tolist()
        return [inner, paddle.rand([3]).tolist(), paddle.nn.functional.dropout(paddle.ones([20])).tolist(), generator.random()]

    draw()
    ckpt.save({"random": ckpt.RandomState(), "generator": generator}, tmp_path, 0)
    expected = [draw(), draw()]
    paddle.seed(1)
    ckpt.load(tmp_path, like={"random": ckpt.RandomState()})
    assert [draw(), draw()] == expected
    paddle.seed(1)
    ckpt.load(tmp_path, like={"generator": generator})
    tracker.reset()
    assert paddle.rand([3]).tolist() == expected[0][1]


def test_other_entries_of_a_layer_are_refused_before_anything_changes(tmp_path: Path) -> None:
    ckpt.save({"m": layer_of(1)}, tmp_path, 0)
    longer = paddle.nn.Sequential(*layer_of(2), paddle.nn.Linear(2, 2))
    shorter = paddle.nn.Sequential(*list(layer_of(2))[:2])
    for like, words in ((longer, ("3.weight",)), (shorter, ("2.weight",))):
        before = [PaddleLeaf(p).flat.tobytes() for p in like.parameters()]
        with refused(ckpt.LeafMismatch, "leaf m", *words):
            ckpt.load(tmp_path, like={"m": like})
        assert [PaddleLeaf(p).flat.tobytes() for p in like.parameters()] == before


def test_an_optimizer_of_another_kind_or_of_other_parameters_is_refused(tmp_path: Path) -> None:
    layer = layer_of(1)
    optimizer = OPTIMIZERS["Adam"](layer.parameters())
    train(layer, optimizer, range(1))
    ckpt.save({"o": optimizer}, tmp_path, 0)
    with refused(ckpt.LeafMismatch, "leaf o", "moment1", "velocity"):
        ckpt.load(tmp_path, like={"o": OPTIMIZERS["Momentum"](layer.parameters())})
    with refused(ckpt.LeafMismatch, "leaf o", "2 parameters", "4"):
        ckpt.load(tmp_path, like={"o": OPTIMIZERS["Adam"](layer.parameters()[:2])})
    with refused(ckpt.LeafMismatch, "leaf o", "shape"):
        ckpt.load(
            tmp_path, like={"o": OPTIMIZERS["Adam"](paddle.nn.Sequential(*layer_of(1), *layer_of(1)).parameters()[4:][::-1])}
        )
    with refused(ckpt.UnsupportedLeaf, "leaf o", "inner_optimizer"):
        ckpt.save({"o": paddle.incubate.LookAhead(optimizer)}, tmp_path, 1)


def test_parameters_in_another_order_keep_their_moments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The layers of a state give the parameters their names; the saved order is that of another program."""

    def model() -> Any:
        return paddle.nn.LayerDict({"a": paddle.nn.Linear(3, 3), "b": paddle.nn.Linear(3, 3)})

    def step(layer: Any, optimizer: Any) -> None:
        (layer["a"](paddle.ones([1, 3])).sum() * 3 + layer["b"](paddle.ones([1, 3])).square().sum()).backward()
        optimizer.step()
        optimizer.clear_grad()

    layer = model()
    optimizer = paddle.optimizer.Adam(0.1, parameters=layer.parameters())
    step(layer, optimizer)
    ckpt.save({"m": layer, "o": optimizer}, tmp_path, 0)
    like = model()
    turned = paddle.optimizer.Adam(0.1, parameters=like.parameters()[::-1])
    ckpt.load(tmp_path, like={"m": like, "o": turned})
    assert "another order" in caplog.text
    for _ in range(2):
        step(layer, optimizer)
        step(like, turned)
    for one, two in zip(layer.parameters(), like.parameters(), strict=True):
        assert one.numpy().tobytes() == two.numpy().tobytes()


def test_statistics_of_a_norm_count_as_buffers() -> None:
    from ckpt.state.torch_keys import module_entries

    layer = paddle.nn.Sequential(paddle.nn.BatchNorm1D(3), paddle.nn.Linear(3, 3))
    layer[1].bias.stop_gradient = True
    entries = module_entries(layer)
    assert (entries.buffers, entries.frozen) == (["0._mean", "0._variance"], ["1.bias"])


def test_importing_ckpt_does_not_import_paddle() -> None:
    import subprocess
    import sys

    code = "import sys, ckpt, numpy; ckpt.RandomState().state_dict(); assert 'paddle' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
