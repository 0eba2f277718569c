"""One rank under torchrun, for test_copies_that_differ.py: `replica_check.py FOLDER CHECK…` runs each check."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.torchrun import run_checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.adapters.torch import ModelState
from ckpt.saving.buffer_shares import OWN_BUFFER_BYTES

WIDTH = 64
ROOT = Path()  # set by `run_checks`


def refused(state: Any, url: Path, step: int = 1, **options: Any) -> str:
    """Return the message with which each rank is refused; nothing is committed."""
    try:
        ckpt.save(state, url, step, **options)
    except ckpt.StepRefused as error:
        assert dist.get_rank() or ckpt.open(url).steps() == []
        return str(error)
    raise AssertionError("the step was committed")


class Experts(nn.Module):
    """A mixture of experts, of which each rank has one under the same names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH, 4))
        self.up = nn.Parameter(torch.full((4 * WIDTH, WIDTH), rank + 1.0))
        self.bias = nn.Parameter(torch.full((4 * WIDTH,), rank + 1.0))


def experts() -> None:
    """Check that experts under equal names are refused, in each form of the state, and saved once they are declared."""
    rank, url = dist.get_rank(), ROOT / "experts"
    module = Experts(rank)
    forms = {"model.": module, "m.model.": ModelState(module), "model": module.state_dict()}
    for prefix, form in forms.items():
        message = refused({prefix.partition(".")[0]: form}, url)
        named = f"leaf {prefix.rstrip('.')}.up has other bytes on ranks 1, 2, 3 than on rank 0"
        assert named in message or re.search(r"leaf \S+\.up has other bytes", message), message
        assert re.search(r"leaf \S+\.bias has", message), message
        assert "gate" not in message, message
        assert "ckpt.PerRank" in message, message
        assert "verify_replicas=False" in message, message
    declared = lambda m: {"gate": m.gate, "up": ckpt.PerRank(m.up), "bias": ckpt.PerRank(m.bias)}  # noqa: E731
    ckpt.save(declared(module), url, 2)
    fresh = Experts(-1)
    ckpt.load(url, like=declared(fresh))
    assert bool((fresh.up == rank + 1).all())
    assert bool((fresh.bias == rank + 1).all())


def batch_norm() -> None:
    """Check that the statistics of a BatchNorm under DDP are refused by name without the module. With it, each rank loads its
    own, and one process those of rank 0."""
    rank, url = dist.get_rank(), ROOT / "batch_norm"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    message = refused({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, url)
    assert "running_mean has other bytes" in message, message
    assert "running_var has other bytes" in message, message
    assert "the module itself for buffers" in message, message
    assert "weight has other bytes" not in message, message
    ckpt.save({"model": model, "optimizer": optimizer.state_dict()}, url, 2)
    mean = [torch.zeros(WIDTH) for _ in range(dist.get_world_size())]
    dist.all_gather(mean, model.module[1].running_mean)
    loaded = ckpt.load(url, group=None)["model"]
    assert torch.equal(loaded["module.1.running_mean"], mean[0])
    assert not torch.equal(mean[0], mean[1])
    model.module[1].reset_running_stats()
    ckpt.load(url, like={"model": model})
    assert torch.equal(model.module[1].running_mean, mean[rank])
    ckpt.save(model.state_dict(), url, 3, verify_replicas=False)


def pipeline() -> None:
    """Check stages of a pipeline, two ranks each: each rank loads its own buffers, one process those of the first rank of a
    stage, and the parameters of a stage must be equal."""
    rank, url = dist.get_rank(), ROOT / "pipeline"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = rank // 2
    model = nn.ModuleDict({f"stage{stage}": nn.BatchNorm1d(20_000)})
    norm = model[f"stage{stage}"]
    norm.running_mean.fill_(rank)
    norm.running_var.fill_(10 + rank)
    ckpt.save(ModelState(model, group=mesh["dp"]), url, 1)
    loaded = ckpt.load(url, group=None)["model"]
    for name, base in ("running_mean", 0), ("running_var", 10):
        assert [loaded[f"stage{s}.{name}"].unique().tolist() for s in range(2)] == [[base], [base + 2.0]]
    norm.reset_running_stats()
    ckpt.load(url, like=ModelState(model, group=mesh["dp"]))
    assert norm.running_mean.unique().tolist() == [rank]
    assert norm.running_var.unique().tolist() == [10 + rank]
    with torch.no_grad():
        norm.weight.fill_(rank if stage else 1.0)
    other = ROOT / "pipeline-drifted"
    message = refused(ModelState(model, group=mesh["dp"]), other)
    assert "leaf model.stage1.weight has other bytes on rank 3 than on rank 2" in message, message


def wrapped_buffers() -> None:
    """Check that a large buffer of a stage, or a part of it, comes back to its rank if PerRank has it, too."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def state(value: float, whole: bool) -> tuple[Any, dict[str, Any]]:
        layer = nn.Module()
        layer.register_buffer("small", torch.full((3,), value))
        layer.register_buffer("codes", torch.full((OWN_BUFFER_BYTES // 4 // 5 + 1, 5), value if whole else 0.0))
        layer.codes[:2] = value
        stage = ModelState(nn.ModuleDict({f"stage{rank // 2}": layer}), group=mesh["dp"])
        return layer, {"stage": stage, "codes": ckpt.PerRank(layer.codes if whole else layer.codes[:2])}

    for whole in (True, False):
        for verify in (None, True):
            url = ROOT / f"wrapped-{whole}-{verify}"
            ckpt.save(state(rank + 1.0, whole)[1], url, 1, verify_replicas=verify)
            layer, like = state(99.0, whole)
            ckpt.load(url, like=like)
            assert layer.small.tolist() == [rank + 1.0] * 3
            assert layer.codes[:2].unique().tolist() == [rank + 1.0]
            assert layer.codes[2:].unique().tolist() == [rank + 1.0 if whole else 0.0]


if __name__ == "__main__":
    run_checks(globals())
