"""Which group a `group=` option means: that of an initialised library, of the launcher's variables, or this process alone."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable

from ckpt.groups.base import Group, SingleProcessGroup
from ckpt.groups.env import EnvGroup
from ckpt.groups.framework_ranks import framework_rank
from ckpt.groups.launchers import EnvRank, rank_from_env
from ckpt.storage.base.errors import InvalidArgument

_group_cache: dict[int, tuple[Callable[[], object], Group]] = {}
"""By the id of the wrapped object, with a reference to it, because another object may get the same id later. Changed without a
lock: a group is looked up for collective calls, and one thread of a rank makes these."""

_env_groups: dict[EnvRank, EnvGroup] = {}
"""The groups of ranks without a network, by their rank, size and job. Changed without a lock, as `_group_cache`."""


def as_group(group: object = "auto") -> Group:
    """Return the group of a `group=` option, without communication.

    group: "auto" (see `detect`), None for this process alone, a Group, an mpi4py communicator, a torch process group or
        a torch device mesh of one dimension. The same object always gives the same Group, and so do equal dimensions of a mesh.

    Raises:
        InvalidArgument: It is any other object, a mesh of several dimensions, or a process group without this process.
        GroupError: With "auto", the variables of the launchers contradict each other (see `detect`).
    """
    if isinstance(group, str) and group == "auto":
        return detect()
    if group is None:
        return SingleProcessGroup()
    if isinstance(group, Group):
        return group
    group = _process_group_of_mesh(group)
    known = _group_cache.get(id(group))
    if known is None or known[0]() is not group:
        known = _group_cache[id(group)] = (_weak_reference(group), _wrap(group))
    return known[1]


def _process_group_of_mesh(group: object) -> object:
    """Return the process group of a torch device mesh, and any other object as it is. Each `mesh["dp"]` is a new object."""
    mesh = sys.modules.get("torch.distributed.device_mesh")
    if mesh is None or not hasattr(mesh, "DeviceMesh") or not isinstance(group, mesh.DeviceMesh):
        return group
    if group.ndim != 1:
        raise InvalidArgument(f"a mesh of {group.ndim} dimensions is not a group; give one dimension, as in mesh['dp']")
    return group.get_group()


def _weak_reference(group: object) -> Callable[[], object]:
    """Return a weak reference if possible: a process group that the user destroys must be freed, with its threads."""
    try:
        return weakref.ref(group)
    except TypeError:
        return lambda: group


def detect() -> Group:
    """Return the ranks of an initialised library, else those that the launcher set in the environment, else this process.

    An initialised library takes precedence, since a process may have inherited the environment of a rank.

    Raises:
        GroupError: The variables of a launcher are not a rank of a group, or those of two launchers contradict each other.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return as_group(dist.group.WORLD) if dist.get_world_size() > 1 else SingleProcessGroup()
    if "jax" in sys.modules:
        from ckpt.groups import jax

        if jax.process_count() > 1:
            return jax.current_group()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        return as_group(mpi.COMM_WORLD)
    env_rank = framework_rank()
    if env_rank is None or env_rank.size == 1:
        env_rank = rank_from_env()
    if env_rank is None or env_rank.size == 1:
        return SingleProcessGroup()
    if env_rank not in _env_groups:
        _env_groups[env_rank] = EnvGroup(found=env_rank)
        atexit.register(_env_groups[env_rank].close)
    return _env_groups[env_rank]


def _wrap(group: object) -> Group:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(group, mpi.Comm):
        if not isinstance(group, mpi.Intracomm) or group == mpi.COMM_NULL:
            raise InvalidArgument(f"{group!r} is not an MPI intracommunicator of this process; give MPI.COMM_WORLD")
        from ckpt.groups.mpi import MpiGroup

        return MpiGroup(group)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available():
        from ckpt.groups.torch import TorchGroup

        if isinstance(group, dist.ProcessGroup):
            return TorchGroup(group)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise InvalidArgument("this process is not in the process group that was given; call only on ranks of the group")
    raise InvalidArgument(
        f"group={group!r}: give 'auto', None, a ckpt.groups.Group, an mpi4py communicator, a torch process group or a "
        "torch device mesh of one dimension"
    )
