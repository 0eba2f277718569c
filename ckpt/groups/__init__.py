"""Groups: the ranks of a job that save and load together, and the exchange of bytes between them.

`detection` chooses the group of a process. There is one file each for torch, jax, MPI and threads. `env` is for ranks without a
network that ckpt can use, as described by a launcher (`launchers`) or by another library (`framework_ranks`); they exchange
bytes through the store (`store_rendezvous`).

Guarantees: a rank that waits for a missing one gets a GroupError after a timeout, except in MPI, which has no timeouts. A
framework is used only if the process has imported it. Used by `repository`, `training` and the packages above them. Start with
`base.Group`.
"""

from ckpt.groups.base import Group, SingleProcessGroup
from ckpt.groups.detection import as_group, detect
from ckpt.groups.env import EnvGroup

__all__ = ["EnvGroup", "Group", "SingleProcessGroup", "as_group", "detect"]
