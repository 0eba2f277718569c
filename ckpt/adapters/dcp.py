"""torch.distributed.checkpoint on our packs: its save, async_save and load run unchanged, every byte is verified.

    dcp.save(state_dict, storage_writer=Writer(url))
    dcp.load(state_dict, storage_reader=Reader(url))

Tensors become leaves under their fully-qualified names, in the packs and manifest of any other step: `ckpt.load` reads what
dcp.save wrote, and dcp.load what `ckpt.save` did. Of the rest, plain values stand in the tree; what torch has pickled is
kept as opaque bytes (`Pickled`), which only torch's planner ever unpickles, on dcp.load.
"""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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

from ckpt.api import check_step
from ckpt.block_io.read_plan import Target
from ckpt.errors import GroupError, LeafNotFound, StepNotFound, UnsupportedLeaf
from ckpt.format.codec import CodecOption
from ckpt.groups.base import Group, SingleProcessGroup
from ckpt.loading.alias_check import check_aliasing
from ckpt.loading.target_matching import TargetMatcher
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Url, open_repository
from ckpt.repository.retention import Keep, as_keep
from ckpt.saving import session_registry as sessions
from ckpt.saving.options import Options
from ckpt.saving.pipeline import give_up_attempt
from ckpt.saving.pipeline import save as run_save
from ckpt.saving.rank_parts import TIMEOUT_SECONDS
from ckpt.saving.writer_session import Session
from ckpt.state.boxes import Box
from ckpt.state.leaves import as_leaf, sharded
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.numpy import BytesLeaf
from ckpt.state.tree import INLINE_BYTES, FlatState, Node, decode_key, flatten
from ckpt.storage.base.errors import CkptError, InvalidArgument

KeyPath = tuple[str | int, ...]
"""The keys and list positions that lead to an entry; its name is their text joined by dots."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pickled:
    """A value as torch.save wrote it. Nothing here unpickles it."""

    data: bytes


class _PlannedGroup(Group):
    """The ranks of one dcp.save. What rank 0 tells the others when a session begins travels with DCP's own plan."""

    name = "torch.distributed.checkpoint"
    can_gather = False

    def __init__(self, rank: int, size: int, session_message: bytes = b"", step: int = 0) -> None:
        self.rank, self.size, self.session_message, self.step = rank, size, session_message, step

    def broadcast(self, data: bytes | None) -> bytes:
        if self.rank == 0:
            self.session_message = self._broadcast_input(data)
        return self.session_message

    def all_gather(self, data: bytes) -> list[bytes]:
        raise GroupError(f"{self!r} makes no gathers of its own")


# --- saving ----------------------------------------------------------------------------------------------------


class _StepAddressed:
    """What DCP calls a checkpoint id is the number of a step."""

    _step: int | None

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self._step = _step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return str(checkpoint_id).isdecimal()


class Writer(_StepAddressed, StorageWriter):  # type: ignore[misc]  # mypy does not look into torch
    """Where dcp.save and dcp.async_save write to: the repository at `url`, as one step of it.

    step: its number; None takes the one after the newest. A decimal `checkpoint_id` of dcp.save sets it, so that one Writer
        serves for many steps.
    codec, digest, keep, memory, overwrite, timeout: as for `ckpt.save`.

    The step is committed when the slowest rank has written; no rank makes a collective call beyond those of DCP. Wait for an
    async_save before the next one to the same URL.
    """

    def __init__(
        self, url: Url, *, step: int | None = None, codec: CodecOption = "auto", digest: str = "auto",
        keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False, timeout: float = TIMEOUT_SECONDS,
    ) -> None:  # fmt: skip
        self._url = url
        self._step = None if step is None else check_step(step)
        self._options = Options(codec, digest, memory, as_keep(keep), overwrite, timeout=timeout)
        self._own_items: frozenset[Any] = frozenset()
        self._session: Session | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._leave_session()  # of a save that DCP gave up
        if kwargs.get("use_collectives") is False:
            raise InvalidArgument("a ckpt step is made by all ranks together: call dcp.save with use_collectives=True")
        if is_coordinator and kwargs.get("rank"):
            raise InvalidArgument(f"rank 0 commits a ckpt step: coordinator_rank={kwargs['rank']} can't be")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._own_items = frozenset(item.index for item in plan.items)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: begin a session, and let the plans tell the other ranks of it."""
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise InvalidArgument("a planner that caches plans keeps what each save tells the ranks: do not enable that")
        ranks = _PlannedGroup(0, len(plans))
        session = self._enter_session(ranks)
        step = session.next_step() if self._step is None else self._step
        return [
            dataclasses.replace(plan, storage_data=_PlannedGroup(rank, len(plans), ranks.session_message, step))
            for rank, plan in enumerate(_move_values_to_rank_0(plans, self._own_items))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, and wait for the commit of the step."""
        ranks = plan.storage_data
        if not isinstance(ranks, _PlannedGroup):
            raise InvalidArgument(f"{type(planner).__name__} loses SavePlan.storage_data on the way to the ranks")
        session = self._session or self._enter_session(ranks)
        try:
            try:
                flat = _flatten_plan(plan, planner)
            except BaseException as error:
                give_up_attempt(session, session.lease.begin_attempt(ranks.step), error)
                raise
            run_save(session, flat, ranks.step, self._options, blocking=True)
        finally:
            self._leave_session()
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: described.Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: every rank has seen the commit."""

    def _enter_session(self, ranks: _PlannedGroup) -> Session:
        self._leave_session()
        self._session = sessions.enter(open_repository(self._url), ranks if ranks.size > 1 else SingleProcessGroup())
        self._session.raise_failed()
        return self._session

    def _leave_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            sessions.leave(session)


def _move_values_to_rank_0(plans: list[SavePlan], items_of_rank_0: frozenset[Any]) -> list[SavePlan]:
    """The plans, with every value that rank 0 has too written by rank 0: so the lists among them stay together."""
    if not plans:
        return plans

    def moves(item: WriteItem) -> bool:
        return item.type == WriteItemType.BYTE_IO and item.index in items_of_rank_0

    moved = [item for plan in plans[1:] for item in plan.items if moves(item)]
    others = [dataclasses.replace(plan, items=[item for item in plan.items if not moves(item)]) for plan in plans[1:]]
    return [dataclasses.replace(plans[0], items=[*plans[0].items, *moved]), *others]


def _flatten_plan(plan: SavePlan, planner: SavePlanner) -> FlatState:
    """What this rank writes, as leaves. One leaf for each name, whatever memory is shared: DCP divides names among ranks."""
    flat = FlatState(None, {})
    shards: dict[str, list[tuple[WriteItem, Any]]] = {}
    nodes: dict[str, Node] = {}
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            nodes[name] = _value_node(name, planner, item, flat)
        else:
            shards.setdefault(name, []).append((item, planner.resolve_data(item).detach()))
    for name, items_and_tensors in shards.items():
        data = [item.tensor_data for item, _ in items_and_tensors]
        try:
            shard = sharded.Shard(
                [tensor for _, tensor in items_and_tensors], data[0].size, [tuple(d.chunk.offsets) for d in data]
            )
            flat.leaves[name] = sharded.as_leaf(shard)
        except TypeError as error:
            raise UnsupportedLeaf(f"leaf {name}: {error}") from error
        nodes[name] = {"array": name, "kind": "torch"}
    paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    flat.node = _nested_tree({tuple(paths.get(name, (name,))): node for name, node in nodes.items()}, paths.values())
    return flat


def _value_node(name: str, planner: SavePlanner, item: WriteItem, flat: FlatState) -> Node:
    """A value that is no tensor: plain where the planner shows it, else the bytes that the planner makes of it."""
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
    flat.leaves[leaf] = BytesLeaf(np.frombuffer(data, np.uint8))
    flat.per_rank.add(leaf)
    return {**flatten(Pickled(b"")).node, "dataclass": [{"array": leaf, "kind": "bytes"}]}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _nested_tree(entries: Mapping[KeyPath, Node], all_paths: Iterable[KeyPath]) -> Node:
    """The tree of entries at these paths. A list of which this rank has not all entries becomes a dict by position."""
    lengths: dict[KeyPath, int] = {}
    for path in all_paths:
        for i, key in enumerate(path):
            if isinstance(key, int):
                lengths[path[:i]] = max(lengths.get(path[:i], 0), key + 1)

    def build(at: KeyPath, below: list[tuple[KeyPath, Node]]) -> Node:
        if len(below) == 1 and below[0][0] == at:
            return below[0][1]
        parts: dict[str | int, list[tuple[KeyPath, Node]]] = {}
        for path, node in below:
            parts.setdefault(path[len(at)], []).append((path, node))
        if at in lengths and sorted(parts, key=str) == sorted(range(lengths[at]), key=str):
            return [build((*at, i), parts[i]) for i in range(lengths[at])]
        pairs = [[key if isinstance(key, str) else [key], build((*at, key), inner)] for key, inner in parts.items()]
        return {"dict": pairs}

    return build((), list(entries.items())) if entries else {"dict": []}


# --- loading ---------------------------------------------------------------------------------------------------


class Reader(_StepAddressed, StorageReader):  # type: ignore[misc]
    """Where dcp.load reads from: a step of the repository at `url`, by default the newest whose manifest is whole.

    step: its number; a decimal `checkpoint_id` of dcp.load sets it.

    Any step will do, whoever wrote it and on however many ranks. Each rank reads the boxes that it needs straight into its
    tensors. Raises IntegrityError where bytes are damaged; a step that turns out damaged is not passed over, since DCP has
    planned for it: name an earlier one then. DCP wraps errors in its CheckpointException.
    """

    def __init__(self, url: Url, step: int | None = None) -> None:
        self._repo = open_repository(url)
        self._step = None if step is None else check_step(step)
        self._checkpoint: Checkpoint | None = None
        self._nodes: dict[str, Node] = {}
        self._paths: dict[str, KeyPath] = {}

    def read_metadata(self) -> described.Metadata:
        """Made of manifest and tree: one chunk for each tensor, since any box of it can be read."""
        try:
            return self._metadata()
        except CkptError as error:
            return _UnreadMetadata(error)

    def _metadata(self) -> described.Metadata:
        step = self._step
        if step is None:
            newest = self._repo.latest()
            if newest is None:
                raise StepNotFound(f"{self._repo.url} has no committed step to load")
            step = newest.step
        checkpoint = self._open(step)
        saved = checkpoint.saved()
        found: dict[str, Any] = {}
        for name, node in self._nodes.items():
            dtype = _torch_dtype(saved[node["array"]].dtype) if _is_tensor(node) and node["array"] in saved else None
            if dtype is None:
                found[name] = described.BytesStorageMetadata()
                continue
            size = torch.Size(saved[node["array"]].shape)
            chunk = described.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            found[name] = described.TensorStorageMetadata(described.TensorProperties(dtype=dtype), size, [chunk])
        # Readers of torch and of others take the field for set; the step is what this reader accepts as a checkpoint id.
        meta = described.StorageMeta(checkpoint_id=str(checkpoint.step))
        return described.Metadata(found, planner_data=self._paths, storage_meta=meta)

    def set_up_storage_reader(self, metadata: described.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise what kept `read_metadata` from opening the step."""
        if isinstance(metadata, _UnreadMetadata):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._checkpoint is not None
        return dataclasses.replace(plan, storage_data=self._checkpoint.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On one rank: a save that committed while the ranks looked must not give them different steps."""
        oldest = min(plan.storage_data for plan in plans)
        return [dataclasses.replace(plan, storage_data=oldest) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._checkpoint is not None
        step = self._checkpoint.step if plan.storage_data is None else plan.storage_data
        checkpoint = self._checkpoint if step == self._checkpoint.step else self._open(step)
        filler = TargetMatcher(checkpoint.saved(), None, checkpoint.where, checkpoint.manifest().bytes_of_leaves)
        targets: list[Target] = []
        tensors, values = [], []
        for item in plan.items:
            if item.storage_index.fqn not in self._nodes:  # planned for a newer step than other ranks saw
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
        found = {".".join(map(str, path)): (path, node) for path, node in _dcp_entries(self._checkpoint.tree())}
        self._nodes = {name: node for name, (_, node) in found.items()}
        self._paths = {name: path for name, (path, _) in found.items()}
        return self._checkpoint


class _UnreadMetadata(described.Metadata):  # type: ignore[misc]
    """Raises why it was not read when it is looked at: an error of `read_metadata` DCP would replace by an AssertionError."""

    def __init__(self, error: CkptError) -> None:
        self.error = error

    @property
    def state_dict_metadata(self) -> Any:
        raise self.error


def _dcp_entries(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """The entries of a tree as DCP cuts a state: at dicts, and at lists that hold tensors or dicts."""
    if isinstance(node, dict) and "object" in node:
        yield from _dcp_entries(node["object"], path)
    elif isinstance(node, dict) and "dict" in node:
        for key, child in node["dict"]:
            yield from _dcp_entries(child, (*path, str(decode_key(key))))
    elif isinstance(node, list) and _has_tensor_or_dict(node):
        for i, child in enumerate(node):
            yield from _dcp_entries(child, (*path, i))
    else:
        yield path, node


def _has_tensor_or_dict(nodes: Sequence[Node]) -> bool:
    return any(
        _has_tensor_or_dict(n) if isinstance(n, list) else isinstance(n, dict) and (_is_tensor(n) or "dict" in n) for n in nodes
    )


def _is_tensor(node: Node) -> bool:
    return isinstance(node, dict) and node.get("kind") in ("torch", "jax", "numpy")


def _torch_dtype(name: str) -> torch.dtype | None:
    """The torch type of saved elements, None where torch has none: such arrays are handed over pickled."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _destination_leaf(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> ArrayLeaf:
    """Where to read a box to: the tensor, or memory of the saved type where the planner's is of another."""
    saved = _torch_dtype(dtype)
    leaf = as_leaf(tensor if saved is None or tensor.dtype == saved else torch.empty(shape, dtype=saved))
    assert leaf is not None
    return leaf


def _as_pickled(value: Any) -> io.BytesIO:
    """A value as DCP's planner wants it."""
    if isinstance(value, Pickled):
        return io.BytesIO(value.data)
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    return made


def _rank() -> int:
    """Of this process, for values of which each rank saved its own."""
    dist = sys.modules.get("torch.distributed")
    return dist.get_rank() if dist is not None and dist.is_available() and dist.is_initialized() else 0


def _step_of(checkpoint_id: Any) -> int:
    text = str(checkpoint_id)
    if not text.isdecimal():
        raise InvalidArgument(
            f"checkpoint_id={checkpoint_id!r}: give the number of a step, or none; the URL of the repository is the Writer's "
            "and the Reader's"
        )
    return check_step(int(text))
