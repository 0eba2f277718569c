"""A model under DP x PP x sharding x MP is saved by 16 ranks and loaded under other divisions, and by one process.

The ranks are threads of this process: the layers, the pipeline, the topology and the sharded optimizers are Paddle's own, and
only the communication groups are without a network. Processes could not train, because Paddle 3.3.1 cannot on a CPU with gloo.
`fleet.init`, the layers and the optimizers are made, and data parallelism and sharding train (test_killed_ranks.py). But the
first forward of tensor parallelism ends with "Do not support c_identity for cpu kernel now" (mp_ops.py), and the first transfer
of a pipeline with "ProcessGroupGLOO does not support send with sync_op and use_calc_stream flag" (p2p_communication.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.rank_threads import all_well, on_ranks
from helpers.refusal import refused
from paddle.distributed import fleet
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.base.topology import CommunicateTopology
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer as sharding
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
    get_rng_state_tracker,
)  # fmt: skip
from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    RowSequenceParallelLinear,
    mark_as_sequence_parallel_parameter,
)  # fmt: skip

import ckpt
from ckpt.adapters.paddle import ModelState
from ckpt.state.leaves import paddle_optimizer

AXES = ["data", "pipe", "sharding", "sep", "model"]
Division = tuple[int, int, int, int, int]


class Hcg:
    """The part of HybridCommunicateGroup that needs no network."""

    def __init__(self, division: Division, rank: int) -> None:
        self._topology = CommunicateTopology(AXES, list(division))
        self._rank = rank
        self._at = self._topology.get_coord(rank)

    def topology(self) -> CommunicateTopology:
        return self._topology

    def get_global_rank(self) -> int:
        return self._rank

    def group(self, axis: str) -> Group:
        ranks = next(ranks for ranks in self._topology.get_comm_list(axis) if self._rank in ranks)
        return Group(ranks.index(self._rank), 1 + AXES.index(axis), ranks)

    def get_sharding_parallel_world_size(self) -> int:
        return self._topology.get_dim("sharding")

    def get_sharding_parallel_rank(self) -> int:
        return self._at.sharding

    def get_sharding_parallel_group(self) -> Group:
        return self.group("sharding")

    def get_pipe_parallel_group(self) -> Group:
        return self.group("pipe")

    def get_data_parallel_group(self) -> Group:
        return self.group("data")


def block(group: Group) -> Any:
    class Block(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.up = ColumnParallelLinear(8, 12, has_bias=True, gather_output=False, mp_group=group)
            self.down = RowParallelLinear(12, 8, has_bias=True, input_is_parallel=True, mp_group=group)
            self.norm = paddle.nn.LayerNorm(8)

        def forward(self, x: Any) -> Any:
            return self.norm(x + self.down(paddle.tanh(self.up(x))))

    return Block


def to_words(layer: Any, x: Any) -> Any:
    return paddle.matmul(x, layer.weight, transpose_y=True)


class Rank:
    """One rank: its part of the model and of the optimizer."""

    def __init__(self, division: Division, rank: int, split: bool = False, seed: int = 0, virtual: int = 0) -> None:
        self.hcg = Hcg(division, rank)
        paddle.seed(seed)
        paddle.distributed.parallel._global_parallel_env = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PADDLE_TRAINER_ID", str(rank))
            patch.setattr(
                paddle.distributed.ParallelEnv, "_device_id", 0, raising=False
            )  # set only where there are accelerators
            patch.setenv("PADDLE_TRAINERS_NUM", str(self.hcg.topology().world_size()))
            mp = self.hcg.group("model")
            patch.setattr(PipelineLayer, "_construct_shared_comm", lambda _: {})  # the groups that add up gradients
            sizes = {"num_embeddings": 16, "embedding_dim": 8, "mp_group": mp}
            parts = [
                SharedLayerDesc("words", VocabParallelEmbedding, None, "weight", **sizes),
                *[LayerDesc(block(mp)), LayerDesc(block(mp)), LayerDesc(paddle.nn.Linear, 8, 8)],
                *[LayerDesc(block(mp)), LayerDesc(block(mp))],
                SharedLayerDesc("words", VocabParallelEmbedding, to_words, "weight", **sizes),
            ]
            self.layer = PipelineLayer(
                parts, topology=self.hcg.topology(), num_stages=division[1], num_virtual_pipeline_stages=virtual or None,
                seg_method="layer:Block" if virtual else "uniform",
            )  # fmt: skip
        paddle.distributed.parallel._global_parallel_env = None
        self.schedule = paddle.optimizer.lr.StepDecay(0.01, 3)
        self.optimizer = paddle.optimizer.AdamW(self.schedule, parameters=self.layer.parameters())
        if division[2] > 1:
            kind = sharding.DygraphShardingOptimizerV2 if split else sharding.DygraphShardingOptimizer
            self.optimizer = kind(self.optimizer, self.hcg)

    def state(self) -> dict[str, Any]:
        return {"train": ModelState(self.layer, self.optimizer, self.hcg)}


def whole(steps: int) -> Rank:
    """Return the model in one process, after some steps of training."""
    rank = Rank((1, 1, 1, 1, 1), 0)
    train(rank, range(steps))
    return rank


def train(rank: Rank, steps: range) -> list[bytes]:
    losses = []
    for step in steps:
        words = paddle.to_tensor(np.random.default_rng(step).integers(0, 16, (3, 4)))
        loss = rank.layer(words).square().mean()
        loss.backward()
        rank.optimizer.step()
        rank.optimizer.clear_grad()
        rank.schedule.step()
        losses.append(loss.numpy().tobytes())
    return losses


def entries_of(rank: Rank) -> dict[str, np.ndarray]:
    """Return all tensors of a model in one process by name."""
    found = {name: tensor.numpy() for name, tensor in rank.layer.state_dict().items()}
    for name, parameter in rank.layer.named_parameters():
        for key, tensor in paddle_optimizer.accumulators_of(rank.optimizer, parameter).items():
            found[f"{name}/{key}"] = tensor.numpy()
    return found


def named(rank: Rank) -> list[tuple[str, Any]]:
    """Return the parameters of a rank by their names in the whole model, which counts the layers of all stages."""
    layer = rank.layer
    found = [(f"shared_layers.{name}", p) for name, p in layer.shared_layers.named_parameters()]
    if layer._num_virtual_pipeline_stages == 1:
        return [*layer.named_parameters()]
    for start, chunk in zip(layer._start_poss, layer._model_chunks, strict=True):
        for index, function in enumerate(chunk.get_run_function()):
            if isinstance(function, paddle.nn.Layer) and function not in layer.shared_layers.values():
                found += [(f"{start + index}.{name}", p) for name, p in function.named_parameters()]
    return found


def boxes_of(rank: Rank, split: bool) -> dict[str, tuple[Any, Callable[[np.ndarray], np.ndarray]]]:
    """Return the tensors of a rank, each with the function that cuts its part from the whole one."""
    found: dict[str, Any] = {}
    degree, at = rank.hcg.topology().get_dim("model"), rank.hcg._at.model

    def cut(parameter: Any) -> Callable[[np.ndarray], np.ndarray]:
        if degree > 1 and parameter.is_distributed:
            return lambda value: np.split(value, degree, parameter.split_axis)[at]
        return lambda value: value

    names = {}
    for name, parameter in named(rank):
        found[name] = parameter, cut(parameter)
        names[parameter.name] = name, parameter
    wrapper = rank.optimizer if hasattr(rank.optimizer, "_hcg") else None
    inner = rank.optimizer if wrapper is None else wrapper._inner_opt
    views = {}
    if split:
        views = {n: v for buffer in wrapper._comm_buffer_list for n, v in buffer._sharding_param_grad_view.items()}
    for parameter in inner._parameter_list:
        name, owner = names[parameter.name]
        if split:
            view = views[parameter.name]
            start, stop = view._param_begin - view._index, view._param_end - view._index
            if start >= stop:
                continue
            view.fill_slice_param(parameter)
        paddle_optimizer.create_accumulators(inner, parameter)
        for key, tensor in paddle_optimizer.accumulators_of(inner, parameter).items():
            if "pow" in key:
                found[f"{name}/{key}"] = tensor, lambda value: value
            elif split:
                of_owner = cut(owner)

                def flat(value: np.ndarray, of_owner: Any = of_owner, start: int = start, stop: int = stop) -> np.ndarray:
                    part = of_owner(value).reshape(-1)
                    return np.pad(part, (0, max(0, stop - part.size)))[start:stop]

                found[f"{name}/{key}"] = tensor, flat
            else:
                found[f"{name}/{key}"] = tensor, cut(owner)
    return found


def ranks_of(division: Division, split: bool = False, seed: int = 0, virtual: int = 0) -> list[Rank]:
    return [Rank(division, rank, split, seed, virtual) for rank in range(int(np.prod(division)))]


def fill(ranks: list[Rank], split: bool, values: dict[str, np.ndarray], steps: int) -> None:
    """Give each rank its parts of the whole values, as after some steps."""
    for rank in ranks:
        for name, (tensor, cut) in boxes_of(rank, split).items():
            tensor.set_value(np.ascontiguousarray(cut(values[name])))
        rank.schedule.step(steps)


def require_parts(ranks: list[Rank], split: bool, values: dict[str, np.ndarray]) -> None:
    """Fail unless each rank has its parts of the whole values; together, all of them."""
    seen = set()
    for rank in ranks:
        for name, (tensor, cut) in boxes_of(rank, split).items():
            want = np.ascontiguousarray(cut(values[name]))
            assert tensor.numpy().tobytes() == want.tobytes(), name
            seen.add(name)
    assert seen == values.keys()


HYBRID: Division = (2, 2, 2, 1, 2)
OTHERS: list[tuple[Division, bool]] = [((4, 1, 1, 1, 2), False), ((1, 2, 2, 1, 2), True), ((1, 4, 1, 1, 1), False)]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Paddle what only the launch of a job on accelerators sets: a strategy, seeds, and the padding of fused buffers."""
    monkeypatch.setitem(tensor_fusion_helper.alignment, "unknown", tensor_fusion_helper.alignment["gpu"])
    fleet.fleet._user_defined_strategy = fleet.DistributedStrategy()
    tracker = get_rng_state_tracker()
    tracker.reset()
    tracker.add("global_seed", 11)
    tracker.add("local_seed", 12)
    tracker.add("model_parallel_rng", 13)


@pytest.mark.parametrize("split", [False, True], ids=["whole parameters", "slices"])
def test_sixteen_ranks_save_and_every_other_division_loads(tmp_path: Path, split: bool) -> None:
    source = whole(4)
    values = entries_of(source)
    ranks = ranks_of(HYBRID, split)
    assert len(ranks) == 16
    fill(ranks, split, values, 4)
    all_well(on_ranks(16, lambda g: ckpt.save(ranks[g.rank].state(), tmp_path, 4, group=g)))
    for division, other_split in [*OTHERS, (HYBRID, not split)]:
        others = ranks_of(division, other_split, seed=9)
        all_well(on_ranks(len(others), lambda g, o=others: ckpt.load(tmp_path, like=o[g.rank].state(), group=g)))
        require_parts(others, other_split, values)
        assert all(rank.schedule.last_epoch == 4 for rank in others)
    one = Rank((1, 1, 1, 1, 1), 0, seed=9)
    ckpt.load(tmp_path, like={"train": ModelState(one.layer, one.optimizer)})
    assert train(one, range(4, 8)) == train(source, range(4, 8))


def test_one_process_saves_and_sixteen_ranks_load(tmp_path: Path) -> None:
    source = whole(3)
    ckpt.save({"train": ModelState(source.layer, source.optimizer)}, tmp_path, 3)
    for split in (False, True):
        ranks = ranks_of(HYBRID, split, seed=5)
        all_well(on_ranks(16, lambda g, r=ranks: ckpt.load(tmp_path, like=r[g.rank].state(), group=g)))
        require_parts(ranks, split, entries_of(source))


@pytest.mark.parametrize("virtual", [0, 2], ids=["stages", "interleaved stages"])
def test_stages_save_and_one_process_loads(tmp_path: Path, virtual: int) -> None:
    """Both ends of the pipeline have the shared embedding; with chunks, the first stage has the layers 0 and 3."""
    source = whole(3)
    division: Division = (1, 2, 1, 1, 2)
    ranks = ranks_of(division, virtual=virtual)
    fill(ranks, False, entries_of(source), 3)
    all_well(on_ranks(4, lambda g: ckpt.save(ranks[g.rank].state(), tmp_path, 3, group=g)))
    one = Rank((1, 1, 1, 1, 1), 0, seed=9)
    ckpt.load(tmp_path, like={"train": ModelState(one.layer, one.optimizer)})
    assert train(one, range(3, 6)) == train(whole(3), range(3, 6))
    others = ranks_of(division, virtual=2 - virtual, seed=4)
    all_well(on_ranks(4, lambda g: ckpt.load(tmp_path, like=others[g.rank].state(), group=g)))
    require_parts(others, False, entries_of(source))


def test_a_model_before_its_first_step_resets_the_optimizer(tmp_path: Path) -> None:
    source = whole(0)
    ckpt.save({"train": ModelState(source.layer, source.optimizer)}, tmp_path, 0)
    expected = train(source, range(3))
    ckpt.load(tmp_path, like={"train": ModelState(source.layer, source.optimizer)})
    assert train(source, range(3)) == expected


def sequence_parallel(hcg: Hcg, seed: int) -> Any:
    """Return a layer whose parts divide the sequence, too; in a group of one rank, with plain linear layers."""
    paddle.seed(seed)
    group = hcg.group("model")
    layer = paddle.nn.Layer()
    layer.norm = paddle.nn.LayerNorm(8)
    if group.nranks == 1:
        layer.up, layer.down = paddle.nn.Linear(8, 12), paddle.nn.Linear(12, 8)
    else:
        layer.up = ColumnSequenceParallelLinear(8, 12, has_bias=True, gather_output=False, mp_group=group)
        layer.down = RowSequenceParallelLinear(12, 8, has_bias=True, input_is_parallel=True, mp_group=group)
        mark_as_sequence_parallel_parameter(layer.norm.weight)
    return layer


def test_sequence_parallel_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks save a part each; four ranks and a process with plain layers load."""
    monkeypatch.setattr(fleet.fleet, "_hcg", Hcg((1, 1, 1, 1, 1), 0), raising=False)  # the layers require one
    axes = {"up.weight": 1, "up.bias": 0, "down.weight": 0}
    hcgs = {size: [Hcg((1, 1, 1, 1, size), rank) for rank in range(size)] for size in (1, 2, 4)}
    layers = {size: [sequence_parallel(hcg, size) for hcg in hcgs[size]] for size in hcgs}
    values = {name: t.numpy() + 1 for name, t in layers[1][0].state_dict().items()}

    def part(name: str, size: int, rank: int) -> np.ndarray:
        return np.split(values[name], size, axes[name])[rank] if name in axes else values[name]

    for rank, layer in enumerate(layers[2]):
        for name, tensor in layer.state_dict().items():
            tensor.set_value(np.ascontiguousarray(part(name, 2, rank)))
    states = {
        size: [{"train": ModelState(layer, None, hcg)} for layer, hcg in zip(layers[size], hcgs[size], strict=True)]
        for size in hcgs
    }
    all_well(on_ranks(2, lambda g: ckpt.save(states[2][g.rank], tmp_path, 0, group=g)))
    for size in (4, 1):
        all_well(on_ranks(size, lambda g, size=size: ckpt.load(tmp_path, like=states[size][g.rank], group=g)))
        for rank, layer in enumerate(layers[size]):
            for name, tensor in layer.state_dict().items():
                assert np.array_equal(tensor.numpy(), part(name, size, rank)), name

    unknown = layers[2][1].norm.weight
    unknown.is_distributed = True
    with refused(ckpt.InvalidArgument, unknown.name, "set split_axis"):
        ModelState(layers[2][1], None, hcgs[2][1]).state_dict()


def test_faults_are_refused(tmp_path: Path) -> None:
    source = whole(1)
    ckpt.save({"train": ModelState(source.layer, source.optimizer)}, tmp_path, 0)
    other = Rank((1, 1, 1, 1, 1), 0)
    momentum = paddle.optimizer.Momentum(other.schedule, parameters=other.layer.parameters())
    with refused(ckpt.LeafMismatch, "leaf train", "moment1", "velocity"):
        ckpt.load(tmp_path, like={"train": ModelState(other.layer, momentum)})
    fixed = paddle.optimizer.AdamW(0.1, parameters=other.layer.parameters())
    with refused(ckpt.LeafMismatch, "leaf train", "learning_rate"):
        ckpt.load(tmp_path, like={"train": ModelState(other.layer, fixed)})
    with refused(ckpt.CkptError, "the layer lacks"):
        ckpt.save({"train": ModelState(paddle.nn.Linear(2, 2), fixed)}, tmp_path, 1)
    sharded = Rank((1, 1, 2, 1, 1), 0).optimizer
    with refused(ckpt.UnsupportedLeaf, "leaf optimizer", "ckpt.adapters.paddle.ModelState"):
        ckpt.save({"optimizer": sharded}, tmp_path, 1)
