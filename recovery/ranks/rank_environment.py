"""The environment of a rank: the variables of torchrun, such as RANK and WORLD_SIZE, and those of ckpt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt.training import heartbeat_page


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """The ranks of this host in one attempt, and the facts that their environment contains."""

    run: str
    attempt: int
    first_rank: int
    rank_count: int
    """The number of ranks on this host. The first of them has local rank 0."""
    world_size: int
    host_index: int
    """The index of this host among the hosts of the attempt."""
    address: str
    port: int
    """The port at `address` on which rank 0 may listen for the other ranks."""
    extra_environment: Mapping[str, str]
    """Further environment variables."""


def build_rank_environment(spec: LaunchSpec, number: int, page: Path) -> Mapping[str, str]:
    """Return the environment variables of a rank.

    As with torchrun, OMP_NUM_THREADS is 1 if it is not set and there are several ranks.
    """
    local = number - spec.first_rank
    variables = {
        "RANK": str(number),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.rank_count),
        "GROUP_RANK": str(spec.host_index),
        "GROUP_WORLD_SIZE": str(spec.world_size // spec.rank_count),
        "ROLE_RANK": str(number),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": spec.address,
        "MASTER_PORT": str(spec.port),
        "TORCHELASTIC_RUN_ID": spec.run,
        "TORCHELASTIC_RESTART_COUNT": str(spec.attempt),
        "CKPT_RUN": spec.run,
        "CKPT_ATTEMPT": str(spec.attempt),
        heartbeat_page.PAGE_VARIABLE: str(page),
        "PYTHONUNBUFFERED": "1",
        # This agent may run under torchrun, whose store has another port, and whose error file is not for the ranks.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if spec.rank_count > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = "1"
    return {**variables, **spec.extra_environment}
