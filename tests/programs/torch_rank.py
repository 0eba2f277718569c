"""One rank under torchrun, for test_parallel_models.py: `torch_rank.py FOLDER CHECK…` runs the checks one after the other.

A check is a function of this file. All compare with `reference()`, a model trained in this process alone and equal on every
rank: a step saved in one layout must load into another, bit for bit.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.flipped_bits import flip_bit_of_leaf
from helpers.torchrun import run_checks
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
from ckpt.adapters.dcp import Pickled, Reader, Writer
from ckpt.adapters.torch import ModelState
from programs.torch_models import everything, full, make_model, make_optimizer, same, shard, sharded, train, whole

ROOT = Path()  # set by `run_checks`


def saved_in(layout: str) -> Path:
    return ROOT / layout


def save_layouts() -> None:
    """Save FSDP2, HSDP, TP with FSDP2 and DDP, each trained for two steps."""
    for layout in ("fsdp", "hsdp", "tp", "ddp"):
        model, optimizer = sharded(layout, seed=0)
        train(model, optimizer)
        url = saved_in(layout)
        saved = ckpt.save({"train": ModelState(model, optimizer), "step": 2}, url, 2)
        want = everything(model, optimizer)
        assert saved.commit.world_size == dist.get_world_size()
        assert saved.commit.raw_bytes == sum(value.nbytes for value in want.values()), "a leaf was written twice"
        same(whole(url), want, f"{layout} into one process")
        if dist.get_rank() == 0:
            torch.save(want, ROOT / f"{layout}.pt")
            names = set(ckpt.open(url)[2])
            assert {"train.model.layer0.up.weight", "train.optimizer.state.layer3.down.bias.exp_avg"} <= names, names


def load_layouts() -> None:
    """Load each saved layout into each layout that this number of ranks can have; fresh optimizers get their state."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    layouts = {4: ["tp", "hsdp", "fsdp"], 2: ["fsdp", "tp", "ddp"], 1: ["plain"]}[size]
    for source in ("fsdp", "hsdp", "tp", "ddp"):
        want = torch.load(ROOT / f"{source}.pt")
        for layout in layouts:
            model, optimizer = sharded(layout)
            assert not optimizer.state
            state = ckpt.load(saved_in(source), {"train": ModelState(model, optimizer), "step": 0})
            assert state["step"] == 2
            same(everything(model, optimizer), want, f"{source} into {layout} on {size}")
            assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]
            if layout == "ddp":
                written = sum(file.stat().st_size for file in saved_in("ddp").rglob("*.pack"))
                assert written < 1.2 * sum(v.nbytes for v in want.values()) + 4 * 65536, "each rank wrote the whole state"
            train(model, optimizer, 1)  # the optimizer can continue with the loaded state


def pipeline() -> None:
    """Load two stages of two data-parallel ranks each into one process, and a plain model into the stages again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    layers = range(2 * stage, 2 * stage + 2)

    def make(seed: int, kind: str) -> tuple[nn.Module, torch.optim.Optimizer, ModelState]:
        model = make_model(layers, seed)
        if kind == "fsdp":
            shard(model, mesh["dp"])
        optimizer = make_optimizer(model)
        return model, optimizer, ModelState(model, optimizer, group=mesh["dp"])

    for kind in ("plain", "fsdp"):
        url = ROOT / f"pipeline-{kind}"
        model, optimizer, state = make(0, kind)
        train(model, optimizer)
        want = everything(model, optimizer)
        ckpt.save({"train": state, "step": 2}, url)
        got = whole(url)
        mine = {name: value for name, value in got.items() if name in want}
        same(mine, want, f"{kind} stage {stage} into one process")
        assert len(got) == 2 * len(want)
        loaded, fresh, state = make(1, kind)
        ckpt.load(url, {"train": state, "step": 0})
        same(everything(loaded, fresh), want, f"{kind} stage {stage} into itself")
    model, optimizer = sharded("fsdp", seed=0)
    train(model, optimizer)
    want = everything(model, optimizer)
    ckpt.save({"train": ModelState(model, optimizer), "step": 2}, url, 9)
    loaded, fresh, state = make(1, "fsdp")
    ckpt.load(url, {"train": state, "step": 0}, step=9)
    got = everything(loaded, fresh)
    same(got, {name: value for name, value in want.items() if name in got}, "one model into stages")


def sharded_tensor() -> None:
    """Save and load the older ShardedTensor, where this torch still has it."""
    from torch.distributed._shard import sharded_tensor as older

    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(size * 3 * 5.0).reshape(size * 3, 5)

    def make(fill: bool) -> Any:
        local = rows[3 * rank : 3 * rank + 3].clone() * fill
        metadata = older.ShardMetadata([3 * rank, 0], [3, 5], f"rank:{rank}/cpu")
        return older.init_from_local_shards([older.Shard(local, metadata)], [size * 3, 5])

    ckpt.save({"w": make(True)}, ROOT / "older")
    assert torch.equal(ckpt.load(ROOT / "older", group=None)["w"], rows)
    like = {"w": make(False)}
    ckpt.load(ROOT / "older", like)
    assert torch.equal(like["w"].local_shards()[0].tensor, rows[3 * rank : 3 * rank + 3])


SEEDS = range(8 if os.environ.get("CKPT_SOAK") == "1" else 1)


def on_mesh(seed: int, mesh: DeviceMesh, order: int, fill: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return tensors of random shapes with random placements over a mesh of three dimensions, and their whole values.

    order: 1, or -1 for the placements in reverse order. The seed gives the same shapes for any mesh.
    """
    drawn = random.Random(seed)
    state, want = {}, {}
    for i in range(16):
        shape = [drawn.randint(0, 11) for _ in range(drawn.randint(1, 3))]
        placements = [drawn.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in range(3)][::order]
        want[f"x{i}"] = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1000 * i + seed
        state[f"x{i}"] = distribute_tensor(want[f"x{i}"] * fill, mesh, placements)
    return state, want


def meshes_of_three() -> list[tuple[int, int, int]]:
    size = dist.get_world_size()
    return [m for m in itertools.product(range(1, size + 1), repeat=3) if math.prod(m) == size and max(m) < size]


def save_meshes() -> None:
    """Save DTensors over every mesh of three dimensions, and load them into other placements, another mesh, and one process."""
    shapes = meshes_of_three() or [(1, 1, dist.get_world_size())]
    # Once for all seeds: each mesh makes process groups, whose threads stay until the end.
    meshes = [init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b", "c")) for mesh_shape in shapes]
    for seed, (number, mesh_shape) in itertools.product(SEEDS, enumerate(shapes)):
        url = ROOT / "meshes" / f"{seed}-{'x'.join(map(str, mesh_shape))}"
        mesh, other = meshes[number], meshes[(number + 1) % len(shapes)]
        state, want = on_mesh(seed, mesh, 1, True)
        ckpt.save(state, url, 0)
        for like, _ in (on_mesh(seed, mesh, -1, False), on_mesh(seed, other, 1, False)):
            ckpt.load(url, like)
            same({name: full(value) for name, value in like.items()}, want, f"{mesh_shape}, seed {seed}")
        same(ckpt.load(url, group=None), want, f"{mesh_shape}, seed {seed}, whole")


def load_meshes() -> None:
    """Load the steps that other numbers of ranks saved into a mesh of these ranks."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size(), 1), mesh_dim_names=("a", "b", "c"))
    for url in sorted((ROOT / "meshes").iterdir()):
        like, want = on_mesh(int(url.name.split("-")[0]), mesh, 1, False)
        ckpt.load(url, like)
        same({name: full(value) for name, value in like.items()}, want, url.name)


def dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer, fill: bool = True) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state, "optim": optimizer_state, "step": 2 if fill else 0, "name": "run" if fill else "",
        "ratio": Fraction(7 if fill else 0, 3), "rows": [torch.arange(5) * fill, torch.ones(2, 3) * fill],
    }  # fmt: skip


def restore_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    assert (state["step"], state["name"], state["ratio"]) == (2, "run", Fraction(7, 3))
    assert torch.equal(state["rows"][0], torch.arange(5))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def dcp_save() -> None:
    for layout in ("fsdp", "tp", "hsdp", "ddp"):
        model, optimizer = sharded(layout, seed=0)
        train(model, optimizer)
        want = everything(model, optimizer)
        url = ROOT / f"dcp-{layout}"
        dcp.save(dcp_state(model, optimizer), storage_writer=Writer(url))
        pending = dcp.async_save(dcp_state(model, optimizer), checkpoint_id="5", storage_writer=Writer(url))
        pending.result()
        if dist.get_rank() == 0:
            torch.save(want, ROOT / f"dcp-{layout}.pt")
            assert ckpt.open(url).steps() == [0, 5]
            assert ckpt.open(url)[5].verify() >= 0
            assert ckpt.open(url)[5].commit.written_bytes == 0, "the same blocks were written again"
        # ckpt.load without DCP: the same names; objects that torch has pickled stay bytes.
        loaded = ckpt.load(url, group=None)
        assert isinstance(loaded["ratio"], Pickled)
        assert [loaded["step"], loaded["name"], len(loaded["rows"])] == [2, "run", 2]
        assert len(loaded["optim"]["param_groups"]) == 2
        for name, value in loaded["model"].items():
            assert torch.equal(value, want[f"model.{name}"]), name
        dist.barrier()


def dcp_load() -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    for source in ("fsdp", "tp", "hsdp", "ddp"):
        want = torch.load(ROOT / f"dcp-{source}.pt")
        for layout in {4: ["fsdp", "tp"], 2: ["fsdp"], 1: ["plain"]}[size]:
            model, optimizer = sharded(layout)
            state = dcp_state(model, optimizer, False)
            dcp.load(state, storage_reader=Reader(ROOT / f"dcp-{source}"))
            restore_dcp(model, optimizer, state)
            same(everything(model, optimizer), want, f"dcp {source} into {layout} on {size}")


def dcp_of_ours() -> None:
    """Load steps of ckpt.save by dcp.load, with their own sharding; then with one byte of a pack flipped."""
    model, optimizer = sharded("fsdp", seed=0)
    train(model, optimizer)
    url = ROOT / "ours"
    ckpt.save({"train": ModelState(model, optimizer), "step": 3, "list": [1, None, "x"]}, url, 4, codec="none")
    want = everything(model, optimizer)
    other, fresh = sharded("tp")
    names, moments = get_state_dict(other, fresh)
    state = {"train": {"model": names, "optimizer": {"state": moments["state"]}}, "step": 0, "list": []}
    dcp.load(state, storage_reader=Reader(url))
    assert (state["step"], state["list"]) == (3, [1, None, "x"])
    got = {f"model.{name}": full(value) for name, value in names.items()}
    got |= {f"optimizer.{n}.{k}": full(v) for n, values in moments["state"].items() for k, v in values.items()}
    same(got, want, "ckpt.save, dcp.load")

    dist.barrier()
    if dist.get_rank() == 0:
        flip_bit_of_leaf(ckpt.open(url)[4], f"train.model.{next(name for name, _ in model.named_parameters())}")
    dist.barrier()
    try:
        dcp.load(state, storage_reader=Reader(url))
    except CheckpointException as error:
        assert error.failures
        kinds = {type(failure) for failure, _ in error.failures.values()}
        assert kinds == {ckpt.IntegrityError}, kinds
    else:
        raise AssertionError("a changed byte was not noticed")


def dcp_refused() -> None:
    """Let one rank fail to write: there is no step, every rank gets the error, and the next save works."""
    url, rank = ROOT / "refused", dist.get_rank()
    good = {"w": torch.ones(3), "rank": "any"}
    dcp.save(good, storage_writer=Writer(url))

    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank == 1:
                raise OSError("no such tensor")
            return super().resolve_data(write_item)

    rows = {f"w{i}": torch.full((100,), float(i)) for i in range(8)}
    try:
        dcp.save(rows, storage_writer=Writer(url, timeout=30), planner=Failing())
    except CheckpointException as error:
        assert isinstance(error.failures[1][0], OSError)
        assert isinstance(error.failures[0][0], ckpt.StepRefused)
    else:
        raise AssertionError("the failure of a rank was not noticed")
    assert ckpt.open(url).steps() == [0]
    dcp.save(rows, storage_writer=Writer(url))
    assert ckpt.open(url).steps() == [0, 1]
    assert torch.equal(ckpt.load(url, group=None)["w7"], rows["w7"])
    dist.barrier()
    try:
        dcp.save(good, checkpoint_id="1", storage_writer=Writer(url))
    except CheckpointException as error:
        assert all(isinstance(failure, ckpt.CkptError) for failure, _ in error.failures.values())
    else:
        raise AssertionError("a step was saved twice")
    for step in (10, 20):  # alternating with ckpt.save, through another group
        ckpt.save(rows, url, step)
        dist.barrier()
        dcp.save(rows, checkpoint_id=str(step + 1), storage_writer=Writer(url))
    assert ckpt.open(url).steps() == [0, 1, 10, 11, 20, 21]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    run_checks(globals())
