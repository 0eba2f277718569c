"""The classes Writer and Reader, with which torch.distributed.checkpoint saves and loads steps of a repository.

    dcp.save(state_dict, storage_writer=Writer(url))
    dcp.load(state_dict, storage_reader=Reader(url))

Tensors become leaves under their fully-qualified names, in the format of any other step. So `ckpt.load` reads what dcp.save
wrote, and dcp.load reads what `ckpt.save` wrote. Every byte is verified. Plain values are stored in the tree. A value that
torch has pickled is stored as bytes (`Pickled`). Only torch's planner unpickles it, in dcp.load.
"""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckpt.adapters.dcp_checkpoint_id import StepAddressed
from ckpt.adapters.dcp_group import PlannedGroup
from ckpt.adapters.dcp_tree import KeyPath, dcp_entries, is_tensor, nested_tree
from ckpt.api import check_step
from ckpt.block_io.read_plan import Target
from ckpt.errors import LeafMismatch, LeafNotFound, UnsupportedLeaf
from ckpt.format.codec import CodecOption
from ckpt.groups.base import SingleProcessGroup
from ckpt.loading.alias_check import check_aliasing
from ckpt.loading.target_matching import TargetMatcher
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Url, open_repository
from ckpt.repository.retention import Keep, as_keep
from ckpt.saving import session_registry
from ckpt.saving.commit_wait import COMMIT_TIMEOUT_SECONDS
from ckpt.saving.options import Options
from ckpt.saving.pipeline import save as run_save
from ckpt.saving.skipped_step import give_up_attempt
from ckpt.saving.writer_session import WriterSession
from ckpt.state.boxes import Box
from ckpt.state.leaves import as_leaf, sharded
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.numpy import BytesLeaf
from ckpt.state.leaves.torch import dtype_of_name
from ckpt.state.tree import INLINE_BYTES, FlatState, Node, flatten
from ckpt.storage.base.errors import CkptError, InvalidArgument


@dataclasses.dataclass(frozen=True, slots=True)
class Pickled:
    """The bytes that torch.save wrote for a value. This package never unpickles them.

    Steps store the module and the name of this class, by which a load finds it: neither may change.
    """

    data: bytes


# --- saving ----------------------------------------------------------------------------------------------------


class Writer(StepAddressed, StorageWriter):  # type: ignore[misc]  # mypy does not look into torch
    """The storage writer with which dcp.save and dcp.async_save write one step of the repository at `url`.

        torch.distributed.checkpoint.save(state_dict, storage_writer=Writer("/data/run", step=10))

    url: as for `ckpt.save`.
    step: the number of the step; None means the number after the newest step. A decimal `checkpoint_id` of dcp.save sets it, so
        that one Writer can write many steps.
    codec, digest, keep, memory, overwrite, timeout: as for `ckpt.save`.

    The step is committed when the slowest rank has written. No rank makes a collective call besides those of DCP. Wait for the
    end of an async_save before the next one to the same URL. DCP wraps errors of a save in its CheckpointException; they are
    those of `ckpt.save`.

    Raises:
        InvalidArgument: An argument has a value that makes no sense. dcp.save raises it for a `checkpoint_id` that is not a
            number, for a planner that caches plans or drops their storage_data, for use_collectives=False, and for another
            coordinator than rank 0.
    """

    def __init__(
        self, url: Url, *, step: int | None = None, codec: CodecOption = "auto", digest: str = "auto",
        keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
        timeout: float = COMMIT_TIMEOUT_SECONDS,
    ) -> None:  # fmt: skip
        self._url = url
        self._step = None if step is None else check_step(step)
        self._options = Options(
            codec=codec, digest=digest, memory=memory, keep=as_keep(keep), overwrite=overwrite, timeout=timeout
        )
        self._own_items: frozenset[Any] = frozenset()
        self._session: WriterSession | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Close the session of an abandoned save, and raise InvalidArgument for options of dcp.save that are not supported."""
        self._leave_session()
        if kwargs.get("use_collectives") is False:
            raise InvalidArgument("all ranks together make a step of ckpt: call dcp.save with use_collectives=True")
        if is_coordinator and kwargs.get("rank"):
            raise InvalidArgument(f"coordinator_rank={kwargs['rank']}: use 0, because rank 0 commits a step of ckpt")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Remember the items of this rank, and return the plan."""
        self._own_items = frozenset(item.index for item in plan.items)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Enter a writer session on rank 0, and return the plans with the message that the other ranks need to join it."""
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise InvalidArgument("turn off the plan cache of the DCP planner: each save must send new plans to the ranks")
        ranks = PlannedGroup(0, len(plans))
        session = self._enter_session(ranks)
        step = session.next_step() if self._step is None else self._step
        return [
            dataclasses.replace(plan, storage_data=PlannedGroup(rank, len(plans), ranks.session_message, step))
            for rank, plan in enumerate(_move_values_to_rank_0(plans, self._own_items))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank, wait for the commit of the step, and return a completed future."""
        ranks = plan.storage_data
        if not isinstance(ranks, PlannedGroup):
            raise InvalidArgument(f"{type(planner).__name__} drops SavePlan.storage_data; use a planner that keeps it")
        session = self._session or self._enter_session(ranks)
        try:
            try:
                flat = _flatten_plan(plan, planner)
            except BaseException as error:
                give_up_attempt(session, session.group_lease.begin_attempt(ranks.step), error)
                raise
            run_save(session, flat, ranks.step, self._options, blocking=True)
        finally:
            self._leave_session()
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: described.Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing, because every rank has waited for the commit."""

    def _enter_session(self, ranks: PlannedGroup) -> WriterSession:
        self._leave_session()
        self._session = session_registry.enter(open_repository(self._url), ranks if ranks.size > 1 else SingleProcessGroup())
        self._session.raise_failed()
        return self._session

    def _leave_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session_registry.leave(session)


def _move_values_to_rank_0(plans: list[SavePlan], items_of_rank_0: frozenset[Any]) -> list[SavePlan]:
    """Return the plans so that rank 0 writes every value that it also has. Then the entries of a list stay on one rank."""
    if not plans:
        return plans

    def moves(item: WriteItem) -> bool:
        return item.type == WriteItemType.BYTE_IO and item.index in items_of_rank_0

    moved = [item for plan in plans[1:] for item in plan.items if moves(item)]
    others = [dataclasses.replace(plan, items=[item for item in plan.items if not moves(item)]) for plan in plans[1:]]
    return [dataclasses.replace(plans[0], items=[*plans[0].items, *moved]), *others]


def _flatten_plan(plan: SavePlan, planner: SavePlanner) -> FlatState:
    """Return the items of this rank as leaves, one for each name, even if they share memory: DCP divides names among ranks."""
    leaves: dict[str, ArrayLeaf] = {}
    shards: dict[str, list[tuple[WriteItem, Any]]] = {}
    nodes: dict[str, Node] = {}
    paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    names = {item.index.fqn for item in plan.items} | paths.keys()
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            nodes[name] = _value_node(name, planner, item, leaves, names)
        else:
            shards.setdefault(name, []).append((item, planner.resolve_data(item).detach()))
    for name, items_and_tensors in shards.items():
        data = [item.tensor_data for item, _ in items_and_tensors]
        try:
            shard = sharded.Shard(
                [tensor for _, tensor in items_and_tensors], data[0].size, [tuple(d.chunk.offsets) for d in data]
            )
            leaves[name] = sharded.as_leaf(shard)
        except TypeError as error:
            raise UnsupportedLeaf(f"leaf {name}: {error}") from error
        nodes[name] = {"array": name, "kind": "torch"}
    tree = nested_tree({tuple(paths.get(name, (name,))): node for name, node in nodes.items()}, paths.values())
    return FlatState(tree, leaves, {name for name, leaf in leaves.items() if isinstance(leaf, BytesLeaf)})


def _value_node(name: str, planner: SavePlanner, item: WriteItem, leaves: dict[str, ArrayLeaf], names: Collection[str]) -> Node:
    """Return the node of a value that is not a tensor: a plain value if the planner gives it, else the bytes of the planner.

    leaves: those of this rank, to which the bytes are added if they are many. names: those of all entries, which a leaf with
        bytes can't have.
    """
    kind = type(planner)
    if isinstance(planner, DefaultSavePlanner) and (kind.resolve_data, kind.transform_object) == (
        DefaultSavePlanner.resolve_data,
        DefaultSavePlanner.transform_object,
    ):
        value = planner.lookup_object(item.index)
        if _is_plain(value):
            return flatten(value).node
    data = planner.resolve_data(item).getvalue()
    if len(data) <= INLINE_BYTES:
        return flatten(Pickled(data)).node
    leaf = f"{name}.data"
    while leaf in names or leaf in leaves:
        leaf += "~"
    leaves[leaf] = BytesLeaf(np.frombuffer(data, np.uint8))
    return {**flatten(Pickled(b"")).node, "dataclass": [{"array": leaf, "kind": "bytes"}]}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


# --- loading ---------------------------------------------------------------------------------------------------


class Reader(StepAddressed, StorageReader):  # type: ignore[misc]
    """The storage reader with which dcp.load reads one step of the repository at `url`.

        torch.distributed.checkpoint.load(state_dict, storage_reader=Reader("/data/run"))

    url: as for `ckpt.save`.
    step: the number of the step; None means the newest one whose manifest and tree are complete. A decimal `checkpoint_id` of
        dcp.load sets it.

    It reads any step, whether DCP or `ckpt.save` wrote it, and on any number of ranks. Each rank reads the boxes that it needs
    into its tensors. A load does not fall back from damaged bytes to an older step, because DCP has already planned the
    load: give the number of an older step. DCP wraps these errors of a load in its CheckpointException.

    Raises:
        InvalidArgument: An argument has a value that makes no sense.
        StepNotFound: dcp.load found no such committed step.
        LeafNotFound: dcp.load asked for a tensor that the step does not have.
        LeafMismatch: Two tensors of the state share memory, but get different bytes. Or two entries of the step have one name
            in DCP, such as those of `{1: x, "1": y}`.
        IntegrityError: Stored bytes are damaged.
        StoreError: The store failed.
    """

    def __init__(self, url: Url, step: int | None = None) -> None:
        self._repo = open_repository(url)
        self._step = None if step is None else check_step(step)
        self._checkpoint: Checkpoint | None = None
        self._nodes: dict[str, Node] = {}
        self._paths: dict[str, KeyPath] = {}

    def read_metadata(self) -> described.Metadata:
        """Return DCP's metadata, from manifest and tree. Each tensor is one chunk, because any box of it can be read."""
        try:
            return self._metadata()
        except CkptError as error:
            return _UnreadMetadata(error)

    def _metadata(self) -> described.Metadata:
        step = self._step
        if step is None:
            newest = self._repo.latest()
            if newest is None:
                raise self._repo.no_step_error()
            step = newest.step
        checkpoint = self._open(step)
        saved = checkpoint.saved()
        found: dict[str, Any] = {}
        for name, node in self._nodes.items():
            dtype = dtype_of_name(saved[node["array"]].dtype) if is_tensor(node) and node["array"] in saved else None
            if dtype is None:
                found[name] = described.BytesStorageMetadata()
                continue
            size = torch.Size(saved[node["array"]].shape)
            chunk = described.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            found[name] = described.TensorStorageMetadata(described.TensorProperties(dtype=dtype), size, [chunk])
        # torch and other readers need this field; the number of the step is what this reader accepts as a checkpoint id.
        meta = described.StorageMeta(checkpoint_id=str(checkpoint.step))
        return described.Metadata(found, planner_data=self._paths, storage_meta=meta)

    def set_up_storage_reader(self, metadata: described.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the error for which `read_metadata` could not open the step."""
        if isinstance(metadata, _UnreadMetadata):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the step that this rank has opened."""
        assert self._checkpoint is not None
        return dataclasses.replace(plan, storage_data=self._checkpoint.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, all with the oldest of the steps that the ranks have opened.

        The steps differ if a save commits while the ranks open them.
        """
        oldest = min(plan.storage_data for plan in plans)
        return [dataclasses.replace(plan, storage_data=oldest) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank into the tensors of the planner, and return a completed future."""
        assert self._checkpoint is not None
        step = self._checkpoint.step if plan.storage_data is None else plan.storage_data
        checkpoint = self._checkpoint if step == self._checkpoint.step else self._open(step)
        filler = TargetMatcher(checkpoint.saved(), None, checkpoint.where, checkpoint.manifest().bytes_of_leaves)
        targets: list[Target] = []
        tensors, values = [], []
        for item in plan.items:
            if item.storage_index.fqn not in self._nodes:  # this rank planned for a newer step than other ranks
                raise LeafNotFound(f"leaf {item.storage_index.fqn} is not in {checkpoint.where}; name the step to load")
            node = self._nodes[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                values.append((item, filler.rebuild(node)))
                continue
            begin = item.storage_index.offset or (0,) * len(item.lengths)
            offset = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
            tensor = planner.resolve_tensor(item)
            destination = _destination_leaf(tensor.detach(), checkpoint.saved()[node["array"]].dtype, tuple(item.lengths))
            targets.append(Target(node["array"], destination, Box(offset, tuple(item.lengths))))
            tensors.append((item, tensor, destination))
        check_aliasing(targets, checkpoint.manifest(), checkpoint.where)
        checkpoint.read([t for t in targets if t.leaf.nbytes] + filler.read_targets())
        for item, tensor, destination in tensors:
            if destination.value.dtype != tensor.dtype:
                tensor.detach().copy_(destination.value)
            planner.commit_tensor(item, tensor)
        for item, finish in values:
            planner.load_bytes(item, _as_pickled(finish()))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self, step: int) -> Checkpoint:
        self._checkpoint = self._repo.of_rank(step, _rank())
        self._nodes, self._paths = {}, {}
        for path, node in dcp_entries(self._checkpoint.tree()):
            name = ".".join(map(str, path))
            if name in self._nodes:
                raise LeafMismatch(f"{self._checkpoint.where} has two entries that DCP calls {name}; load it with ckpt.load")
            self._nodes[name], self._paths[name] = node, path
        return self._checkpoint


class _UnreadMetadata(described.Metadata):  # type: ignore[misc]
    """Raises the error of `read_metadata` at the first use; DCP would replace an error raised there by an AssertionError."""

    def __init__(self, error: CkptError) -> None:
        self.error = error

    @property
    def state_dict_metadata(self) -> NoReturn:
        raise self.error


def _destination_leaf(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> ArrayLeaf:
    """Return the leaf to read a box into: the tensor, or new memory if the saved dtype differs from that of the tensor."""
    saved = dtype_of_name(dtype)
    leaf = as_leaf(tensor if saved is None or tensor.dtype == saved else torch.empty(shape, dtype=saved))
    assert leaf is not None
    return leaf.target()


def _as_pickled(value: object) -> io.BytesIO:
    """Return a value as pickled bytes, which the planner of DCP expects."""
    if isinstance(value, Pickled):
        return io.BytesIO(value.data)
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    return made


def _rank() -> int:
    """Return the rank of this process, which selects values that each rank saved for itself."""
    dist = sys.modules.get("torch.distributed")
    return dist.get_rank() if dist is not None and dist.is_available() and dist.is_initialized() else 0
