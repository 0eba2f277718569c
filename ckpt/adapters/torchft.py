"""A CheckpointTransport of torchft: a replica that is behind reads the state from the memory of a healthy one.

    manager = Manager(..., checkpoint_transport=CkptTransport())

Nothing is pickled, every byte is verified, and peers on one host share memory.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torchft.checkpointing.transport import CheckpointTransport

import ckpt
from ckpt.adapters.peer_address import load_from_peer, open_peer
from ckpt.adapters.peer_memory import PeerMemory
from ckpt.storage.base.errors import InvalidArgument

T = TypeVar("T")

_SHARD = "ckpt.torchft.shard"
"""The key of a local shard in a stored state. The dict with it stands in place of a DTensor."""


class CkptTransport(CheckpointTransport[T]):  # type: ignore[misc]
    """Sends a state through the memory of the host that has it.

        manager = Manager(..., checkpoint_transport=CkptTransport())

    state_dict: returns the state of this process. It is needed where the state has DTensors, and only their meshes are used:
        each rank sends its own shards, and the receiver makes DTensors of them on its own mesh of the same shape.
    host: as for `PeerMemory`.

    The state has what `ckpt.save` stores: dicts, lists, tuples, tensors and plain values. A received state has new tensors on
    the host, so that nothing of the receiver changes before torchft loads it.

    Raises:
        InvalidArgument: The environment lacks what `PeerMemory` needs to serve other hosts.
        StoreError: The memory can't be used.
    """

    def __init__(self, state_dict: Callable[[], object] | None = None, host: str | None = None) -> None:
        self._state_dict = state_dict
        self._memory = PeerMemory(host)

    def metadata(self) -> str:
        """Return the address from which the peers read."""
        return self._memory.address

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Copy the state to the memory that peers read. It may change when this returns.

        Raises:
            InvalidArgument: A DTensor has a placement that is not a shard or replica.
            UnsupportedLeaf: The state has a value that ckpt can't store.
            CkptError: As of `ckpt.save`.
        """
        ckpt.save(
            tree_map_only(DTensor, _encode, state_dict), self._memory.store, step, keep=1, overwrite=True, group=None,
            codec="none", nan="allow",
        )  # fmt: skip

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of a step; wait for it until the timeout.

        Raises:
            TimeoutError: The peer has not sent this step in time, or can't be reached.
            InvalidArgument: The state has a DTensor, and this process has no mesh for it; or the peer serves with TLS, and
                the environment of this process has no CKPT_CA_FILE or token.
            Refused: The peer serves only its own host, or without TLS, or the token is wrong.
            Untrusted: The certificate of the peer can't be verified.
            IntegrityError: Bytes were damaged.
        """
        seconds = timeout.total_seconds()
        loaded = load_from_peer(open_peer(metadata, seconds), step, seconds, f"step {step} of rank {src_rank}")
        meshes = _meshes_in(self._state_dict()) if self._state_dict is not None else {}
        found: T = tree_map(lambda node: _decode(node, meshes) if _is_shard(node) else node, loaded, is_leaf=_is_shard)
        return found

    def disallow_checkpoint(self) -> None:
        """Do nothing: what was sent is a copy, so the state may change."""

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, and free the memory."""
        self._memory.close()


# --- DTensors ----------------------------------------------------------------------------------------------------

_MeshKind = tuple[str, tuple[int, ...], tuple[str, ...] | None]
"""Type of device, shape, and names of the axes of a mesh."""


def _kind_of(mesh: DeviceMesh) -> _MeshKind:
    return mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names


def _meshes_in(state: object) -> dict[_MeshKind, DeviceMesh]:
    return {_kind_of(leaf.device_mesh): leaf.device_mesh for leaf in tree_leaves(state) if isinstance(leaf, DTensor)}


def _encode(tensor: DTensor) -> dict[str, Any]:
    placements = [_encode_placement(placement) for placement in tensor.placements]
    layout = {
        "mesh": _kind_of(tensor.device_mesh),
        "placements": placements,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }
    return {_SHARD: tensor._local_tensor.detach(), **layout}


def _encode_placement(placement: Placement) -> int | None:
    """Return the axis of a shard, None for a replica."""
    if type(placement) is Replicate:
        return None
    if type(placement) is Shard:
        return int(placement.dim)
    raise InvalidArgument(f"a DTensor with the placement {placement} can't be sent: redistribute it to Shard or Replicate")


def _is_shard(node: object) -> bool:
    return isinstance(node, dict) and _SHARD in node


def _decode(node: dict[str, Any], meshes: dict[_MeshKind, DeviceMesh]) -> DTensor:
    mesh = meshes.get(node["mesh"])
    if mesh is None:
        kind, shape, names = node["mesh"]
        raise InvalidArgument(
            f"the state has a DTensor on a {kind} mesh of shape {shape} ({names}), and this process none like it: give "
            "CkptTransport(state_dict=) a function that returns the state with DTensors"
        )
    placements = [Replicate() if axis is None else Shard(axis) for axis in node["placements"]]
    # `DTensor.from_local` would drop the shard of a rank that is not in the mesh; torchft makes its DTensors like this, too.
    local = node[_SHARD].to(mesh.device_type)
    meta = TensorMeta(torch.Size(node["shape"]), tuple(node["stride"]), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)
