"""The class ModelState, which saves a Paddle model and its optimizer so that any other hybrid parallelism can load them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle
from paddle.optimizer.lr import LRScheduler

from ckpt.adapters.paddle_fit import Checkpoints as Checkpoints
from ckpt.adapters.paddle_group_sharded import GroupSharding
from ckpt.adapters.paddle_layout import (
    Layout,
    OptimizerPart,
    flat_shard,
    owned_parts,
    tensors_of,
    unwrap_layer,
    unwrap_optimizer,
)
from ckpt.state.leaves import paddle_optimizer
from ckpt.state.leaves.paddle_objects import module_entries, schedule_state, set_schedule_state
from ckpt.state.leaves.sharded import Shard
from ckpt.state.torch_keys import ModuleEntries
from ckpt.storage.base.errors import InvalidArgument


class ModelState:
    """A layer and its optimizer as one entry of a state, under the names of the whole model.

        hcg = fleet.get_hybrid_communicate_group()
        state = {"train": ModelState(model, optimizer, hcg), "random": ckpt.RandomState()}

    layer: a layer, or what `fleet.distributed_model` returns for it.
    optimizer: an optimizer of paddle.optimizer, or what `fleet.distributed_optimizer` returns for it.
    hcg: the hybrid communicate group, which defines how the ranks divide the model; None if all ranks have the same one.

    It knows tensor parallelism (`is_distributed` and `split_axis` of parameters), pipeline stages (PipelineLayer, shared layers
    too), data parallelism, the sharding of the optimizer (stage 1, with and without `split_param`), and what
    `group_sharded_parallel` returns (stages 2 and 3). A step of one division is loaded by every other one, and by one process.

    Raises:
        InvalidArgument: The optimizer is not one of Paddle, or is sharded in another way; or, at a save or load, it has
            parameters that the layer lacks.
        LeafMismatch: At a load, if the optimizer is of another kind than the saved one.
    """

    def __init__(self, layer: Any, optimizer: Any = None, hcg: Any = None) -> None:
        self._layer, stage3 = unwrap_layer(layer)
        self._optimizer: Any = None
        self._sharding: Any = None
        if optimizer is not None:
            self._optimizer, self._sharding = unwrap_optimizer(optimizer)
        if stage3 is None and self._optimizer is not None and "_optim" in vars(self._optimizer):
            raise InvalidArgument(
                "ModelState: the optimizer has slices of parameters: give the layer of group_sharded_parallel"
            )
        stage2 = self._sharding if type(self._sharding).__name__ == "GroupShardedOptimizerStage2" else None
        self._group_sharding: GroupSharding | None = None
        if stage3 is not None or stage2 is not None:
            self._group_sharding = GroupSharding(stage3 or stage2, hcg)
            topology, rank = self._group_sharding.topology()
        else:
            topology, rank = (None, 0) if hcg is None else (hcg.topology(), int(hcg.get_global_rank()))
        self._layout = Layout(topology, rank, self._layer)
        self._cleared: list[Any] = []  # the parameters of which a load removes the optimizer's state

    def members(self) -> ModuleEntries:
        """Return the names in `state_dict` of buffers, which may differ between ranks, and of frozen parameters."""
        state, entries = self._layer.state_dict(), module_entries(self._layer)
        buffers, frozen = ({id(state[name]) for name in names if name in state} for names in (entries.buffers, entries.frozen))
        tensors = tensors_of(self._layer).items()
        return ModuleEntries(*([f"model.{name}" for name, t in tensors if id(t) in kind] for kind in (buffers, frozen)))

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by name, without a copy; each with the box of the whole tensor that this rank has."""
        buffers = set(self.members().buffers)
        found: dict[str, Any] = {
            "model": {name: self._shard(name, t, f"model.{name}" in buffers) for name, t in tensors_of(self._layer).items()}
        }
        if self._optimizer is not None:
            state = {}
            for part in self._parts():
                entries = paddle_optimizer.accumulators_of(self._optimizer, part.parameter)
                if shards := {key: part.shard(key, t) for key, t in entries.items() if part.stores(key, t)}:
                    state[part.name] = shards
            found["optimizer"] = {"state": state, **self._rate()}
        return found

    def state_dict_like(self, saved: Any, everything: bool) -> dict[str, Any]:
        """Return the state that a load fills: the entries of this rank, and the saved optimizer state of its parameters.

        saved: the part of the saved state that is loaded, with a `ckpt.format.manifest.Saved` in place of each array.
        everything: whether that is the whole saved state. Otherwise, entries that are not in it keep their values.

        Raises ValueError if the optimizer is of another kind than the saved one.
        """
        target = self.state_dict()
        self._cleared = []
        saved_optimizer = (saved or {}).get("optimizer")
        if self._optimizer is None or not isinstance(saved_optimizer, dict):
            if not everything:
                target.pop("optimizer", None)
            return target
        has_rate = "learning_rate" in saved_optimizer or "LR_Scheduler" in saved_optimizer  # an imported .pdopt may have none
        if everything and has_rate and (missing := self._rate().keys() - saved_optimizer.keys()):
            raise ValueError(f"the saved optimizer has no {min(missing)}: construct it with the kind of learning rate as saved")
        state: dict[str, Any] = {}
        for part in self._parts():
            if names := saved_optimizer.get("state", {}).get(part.name):
                targets = self._targets(part, set(names), everything)
                if targets is None:
                    self._cleared.append(part.parameter)
                else:
                    state[part.name] = targets
            elif everything:
                self._cleared.append(part.parameter)
        target["optimizer"] = {"state": state, **{key: None for key in self._rate() if key in saved_optimizer}}
        return target

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Finish a load, which has filled the tensors in place: set the learning rate, and reset parameters without a state."""
        if self._optimizer is None or "optimizer" not in state:
            return
        for parameter in self._cleared:
            paddle_optimizer.set_accumulators(self._optimizer, parameter, {}, parameter.name)
        loaded = state["optimizer"]
        if "LR_Scheduler" in loaded:
            set_schedule_state(self._optimizer._learning_rate, loaded["LR_Scheduler"])
        elif "learning_rate" in loaded:
            self._optimizer.set_lr(loaded["learning_rate"])

    def _shard(self, name: str, tensor: Any, is_stored_whole: bool) -> Any:
        """Return a tensor of the model with the boxes that this rank has."""
        if self._group_sharding is not None and (part := self._group_sharding.slice_of(tensor)) is not None:
            box, shape = self._layout.box(tensor)
            return flat_shard(
                part.tensor, (part.start, part.stop), box, shape, self._layout.replica(name, tensor, ("sharding",))
            )
        return self._layout.shard(name, tensor, is_stored_whole)

    def _parts(self) -> Iterator[OptimizerPart]:
        names: dict[str, tuple[str, Any]] = {}
        for name, tensor in tensors_of(self._layer).items():
            names.setdefault(tensor.name, (name, tensor))
        if self._group_sharding is not None:
            parts = self._group_sharding.owned_parts(self._optimizer, {key: tensor for key, (_, tensor) in names.items()})
        else:
            parts = owned_parts(self._optimizer, self._sharding)
        for part in parts:
            if part.name not in names:
                raise InvalidArgument(
                    f"ModelState: the optimizer has the parameter {part.name}, which the layer lacks: give the whole layer"
                )
            yield OptimizerPart(part, *names[part.name], self._layout)

    def _rate(self) -> dict[str, Any]:
        rate = self._optimizer._learning_rate
        return {"LR_Scheduler": schedule_state(rate)} if isinstance(rate, LRScheduler) else {"learning_rate": float(rate)}

    def _targets(self, part: OptimizerPart, names: set[str], everything: bool) -> dict[str, Shard | Any] | None:
        """Return the tensors of one parameter for a load to fill; create those that do not exist yet.

        None if the saved optimizer has made no step: stages 2 and 3 make the master weights earlier.
        """
        have = paddle_optimizer.accumulators_of(self._optimizer, part.parameter)
        if not names <= have.keys():
            with paddle.no_grad():
                paddle_optimizer.create_accumulators(self._optimizer, part.parameter)
            have = paddle_optimizer.accumulators_of(self._optimizer, part.parameter)
        if names == {paddle_optimizer.MASTER} and names < have.keys():
            return None
        if not names <= have.keys() or (everything and have.keys() != names):
            raise ValueError(
                f"for {part.name} the optimizer has {', '.join(sorted(have)) or 'nothing'}, the saved one "
                f"{', '.join(sorted(names))}: construct it as it was when saved"
            )
        return {key: part.shard(key, have[key]) for key in names}
