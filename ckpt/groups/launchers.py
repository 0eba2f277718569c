"""Rank, size and job of this process as a launcher sets them in environment variables."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt.errors import GroupError
from ckpt.groups.store_rendezvous import JobId
from ckpt.storage.base.checked_decode import read_json
from ckpt.storage.base.errors import first_line

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EnvRank:
    """Rank, size and job of this process. `name` is that of the group in messages."""

    name: str
    rank: int
    size: int
    job_id: JobId


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The environment variables of one launcher."""

    rank: str
    size: str
    job_name: str = ""
    """The name that the launcher gives to a job, if it does. Another job of this name is an earlier start of it."""
    job: tuple[str, ...] = ()
    """What else distinguishes this job or this start of it, with equal values on all ranks."""
    is_scheduler: bool = False
    """Whether this starts programs of any kind, which may start ranks themselves: workers of Ray inherit these variables."""
    applies: Callable[[Environ], bool] = lambda environ: True
    """Whether the variables describe this process."""


def _is_mindspore_rank(environ: Environ) -> bool:
    """Return whether MindSpore's variables give the rank of this process.

    The scheduler of msrun runs the same program and has RANK_ID=0. A worker without MS_NODE_ID gets its rank in
    mindspore.communication.init(); until then it may have inherited the RANK_ID of another process.
    """
    role = environ.get("MS_ROLE", "")
    return role == "" or (role == "MS_WORKER" and environ.get("MS_NODE_ID", "").isdecimal())


_SCHEDULER_ADDRESS = ("MS_SCHED_HOST", "MS_SCHED_PORT")

_LAUNCHERS = (
    # torchrun, accelerate, DeepSpeed, Lightning, Ray Train with torch, ckpt-run, and by hand.
    # Not TORCHELASTIC_RESTART_COUNT: each agent counts its own restarts, so it differs between the nodes of one job.
    # The address distinguishes two jobs without a name.
    _Launcher("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", ("MASTER_ADDR", "MASTER_PORT")),
    # paddle.distributed.launch and spawn. A parameter server of Paddle is not a rank.
    _Launcher("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_JOB_ID", ("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS"),
              applies=lambda environ: environ.get("TRAINING_ROLE", "TRAINER") == "TRAINER"),
    # msrun of MindSpore, old and new. RANK_ID alone is also set by hand for Ascend devices.
    _Launcher("MS_NODE_ID", "MS_WORKER_NUM", "", _SCHEDULER_ADDRESS, applies=_is_mindspore_rank),
    _Launcher("RANK_ID", "RANK_SIZE", "", _SCHEDULER_ADDRESS, applies=_is_mindspore_rank),
    # Conventions of scripts that pass these to jax.distributed.initialize.
    _Launcher("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "", ("JAX_COORDINATOR_ADDRESS",)),
    _Launcher("JAX_PROCESS_INDEX", "JAX_PROCESS_COUNT", "", ("JAX_COORDINATOR_ADDRESS",)),
    _Launcher("HOROVOD_RANK", "HOROVOD_SIZE", "", ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")),
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", is_scheduler=True),
    _Launcher("PMI_RANK", "PMI_SIZE", is_scheduler=True),  # MPICH, Intel MPI, Cray. PMIx alone has a rank and no size.
    _Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", is_scheduler=True),  # mpirun_rsh of MVAPICH2
    _Launcher("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "LSB_JOBID", ("PMIX_NAMESPACE",), is_scheduler=True),  # jsrun of LSF
    _Launcher("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_JOB_ID", is_scheduler=True),
    # Not SLURM_NTASKS: the batch script has it too, and it is one process that starts the ranks.
    _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", ("SLURM_STEP_ID", "SLURM_RESTART_COUNT"), True),
)  # fmt: skip


def rank_from_env(environ: Environ = os.environ) -> EnvRank | None:
    """Return rank, size and job as set by the first launcher found, None if no launcher has set them.

    Raises GroupError if rank and size do not match, or where another launcher has started more ranks than the first one.
    """
    found = _all_ranks(environ)
    if not found:
        return None
    first = found[0]
    larger = next((other for other in found[1:] if other.size > first.size), None)
    # torchrun names the job that it starts: one with several ranks in each task of Slurm is a job of its own. With one rank it
    # may also have started an mpiexec, whose ranks have inherited its variables.
    is_own_job = first.size > 1 and "(RANK," in first.name and bool(environ.get("TORCHELASTIC_RUN_ID"))
    if larger is not None and not is_own_job:
        raise GroupError(
            f"rank {first.rank} of {first.size} in the {first.name} contradicts rank {larger.rank} of {larger.size} in the "
            f"{larger.name}: unset the wrong variables, or give group="
        )
    return first


def job_id(environ: Environ, job_name: str, *words: str) -> JobId:
    """Return the id of a job: CKPT_RUN_ID, or else the name that its launcher gave it and other words that distinguish it."""
    if "CKPT_RUN_ID" in environ:
        job_name, words = environ["CKPT_RUN_ID"], ()
    named = job_name not in ("", "none")  # torchrun sets "none" for a job without a name
    return JobId(hashlib.sha256("\n".join((job_name, *words)).encode()).hexdigest()[:12], named)


def paddle_job(environ: Environ) -> JobId:
    """Return the id of a job of Paddle."""
    return next(_job_of(launcher, environ) for launcher in _LAUNCHERS if launcher.rank == "PADDLE_TRAINER_ID")


def mindspore_job(environ: Environ) -> JobId:
    """Return the id of a job of MindSpore."""
    return next(_job_of(launcher, environ) for launcher in _LAUNCHERS if launcher.rank == "RANK_ID")


def _all_ranks(environ: Environ) -> list[EnvRank]:
    found = []
    for launcher in _launchers(environ):
        rank, size = environ[launcher.rank], environ[launcher.size]
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise GroupError(
                f"the environment has {launcher.rank}={rank} and {launcher.size}={size}, which is not a rank of a group; "
                "correct or unset them, or give group=None"
            )
        name = f"environment ({launcher.rank}, {launcher.size})"
        found.append(EnvRank(name, int(rank), int(size), _job_of(launcher, environ)))
    by_tensorflow = _tensorflow_rank(environ)
    if by_tensorflow is not None:
        position = next((i for i, rank in enumerate(found) if _is_of_scheduler(rank)), len(found))
        found.insert(position, by_tensorflow)
    return found


def _launchers(environ: Environ) -> list[_Launcher]:
    """Return the launchers of which rank and size are set and describe this process."""
    in_ray = "RAY_RAYLET_PID" in environ
    return [
        launcher for launcher in _LAUNCHERS
        if launcher.rank in environ and launcher.size in environ
        and launcher.applies(environ) and not (in_ray and launcher.is_scheduler)
    ]  # fmt: skip


def _is_of_scheduler(rank: EnvRank) -> bool:
    return any(launcher.is_scheduler and f"({launcher.rank}," in rank.name for launcher in _LAUNCHERS)


def _job_of(launcher: _Launcher, environ: Environ) -> JobId:
    return job_id(environ, environ.get(launcher.job_name, ""), *(environ.get(name, "") for name in launcher.job))


# --- TensorFlow ------------------------------------------------------------------------------------------------


def _tensorflow_rank(environ: Environ) -> EnvRank | None:
    """Return the rank that TF_CONFIG gives: the chief is rank 0, and the workers follow. Other tasks are not ranks.

    In a cluster with parameter servers, the chief alone has the state, so there is no group.
    """
    text = environ.get("TF_CONFIG", "")
    if not text.strip():
        return None
    try:
        config = read_json(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        chiefs = _addresses(cluster, "chief") or _addresses(cluster, "master")
        workers = _addresses(cluster, "worker")
        kind, index = task.get("type"), int(task.get("index", 0))
        if "ps" in cluster or kind not in ("chief", "master", "worker"):
            return None
        own, rank = (workers, len(chiefs) + index) if kind == "worker" else (chiefs, index)
        if not 0 <= index < len(own):
            raise ValueError(f"no {kind} has the index {index}")
    except (ValueError, TypeError, AttributeError) as error:
        raise GroupError(
            f"the environment has a TF_CONFIG that is not the description of a cluster ({first_line(error)}); correct or unset "
            "it, or give group=None"
        ) from error
    return EnvRank("environment (TF_CONFIG)", rank, len(chiefs) + len(workers), job_id(environ, "", *chiefs, *workers))


def _addresses(cluster: dict[str, Any], kind: str) -> list[str]:
    """Return the addresses of the tasks of one kind: a list of them, or, as TensorFlow also allows, a dict by index."""
    found = cluster.get(kind) or []
    if isinstance(found, dict):
        found = [found[key] for key in sorted(found, key=int)]
    return [str(address) for address in found]


# --- signs of other ranks --------------------------------------------------------------------------------------

_SIZE_ENDINGS = ("SIZE", "WORLD_SIZE", "NUM_RANKS", "NRANKS", "NPROCS")

_INDEX_AND_COUNTS = {
    "PROCESS_ID|PROCESS_INDEX": ("NUM_PROCESSES", "PROCESS_COUNT"),  # scripts for jax.distributed.initialize
    "NODE_RANK|NODE_INDEX": ("NUM_NODES", "NNODES"),  # torchrun by variables (PET_), SkyPilot, nodes of AWS Batch
    "WORKER_ID|WORKER_INDEX": ("NUM_WORKER", "NUM_WORKERS", "GROUP_SIZE"),  # DMLC_, LWS_ (LeaderWorkerSet)
    "TASK_INDEX": ("WORKER_NUM", "NUM_TASKS"),  # VC_ (Volcano)
    "SLICE_ID": ("NUM_SLICES",),  # MEGASCALE_ (TPU slices)
}
"""Names of an index, and those of the count that must be above 1; both have the same prefix, or none."""

_HOST_LISTS = ("SM_HOSTS", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "NEURON_PJRT_PROCESSES_NUM_DEVICES")
"""Lists with an item for each host or process of a job, as JSON (SageMaker) or separated by commas."""

_COORDINATORS = ("JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS", "MASTER_ADDR")
_LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|\[?::1\]?)(:\d+)?")

MAX_RANKS = 1 << 24
"""The most ranks of a job. A larger number is not a rank, and not a number of ranks."""


def signs_of_other_ranks(environ: Environ = os.environ) -> list[str]:
    """Return the variables, as NAME=value, by which this process looks like one of many; none for an ordinary process.

    They are the rank and size of any launcher with more than one rank, a rank above 0, the local rank of a larger world, an
    index with a count above 1, and lists of several hosts.
    """
    names: dict[str, None] = {}
    for launcher in _launchers(environ):
        if _number(environ, launcher.size) > 1:
            names |= dict.fromkeys((launcher.rank, launcher.size))
    with suppress(GroupError):
        if (by_tensorflow := _tensorflow_rank(environ)) is not None and by_tensorflow.size > 1:
            names["TF_CONFIG"] = None
    for name in environ:
        if _number(environ, name) >= 0 and not _is_inherited(name, environ):
            names |= dict.fromkeys(_rank_signs(name, environ) or _index_signs(name, environ))
    lists = [*(name for name in _HOST_LISTS if len(_items(environ.get(name, ""))) > 1), *_vertex_signs(environ)]
    names |= dict.fromkeys(name for name in lists if not _is_inherited(name, environ))
    return [name if _number(environ, name) < 0 else f"{name}={environ[name]}" for name in names]


def _rank_signs(name: str, environ: Environ) -> tuple[str, ...]:
    """Return the variables of a rank and its size, or of a rank above 0."""
    match = re.fullmatch(r"((?:\w+_)?)(RANK|RANKID|RANK_ID)", name)
    if match is None:
        return ()
    more = {"LOCAL_RANK": ["WORLD_SIZE"], "RANK_ID": ["RANK_SIZE"]}.get(name, [])
    sizes = [match[1] + ending for ending in _SIZE_ENDINGS] + more
    if size := next((size for size in sizes if _number(environ, size) > 1), ""):
        return name, size
    return (name,) if match[2] == "RANK" and _number(environ, name) > 0 else ()


def _index_signs(name: str, environ: Environ) -> tuple[str, ...]:
    """Return the variables of an index and its count, or of an index and the address at which the others meet."""
    for indices, counts in _INDEX_AND_COUNTS.items():
        if match := re.fullmatch(rf"((?:\w+_)?)(?:{indices})", name):
            return next(((name, match[1] + count) for count in counts if _number(environ, match[1] + count) > 1), ())
    # An Indexed Job of Kubernetes. Without an address, its pods are independent of each other.
    if name == "JOB_COMPLETION_INDEX":
        found = (at for at in _COORDINATORS if environ.get(at) and not _LOOPBACK.fullmatch(environ[at]))
        return next(((name, at) for at in found), ())
    return ()


def _vertex_signs(environ: Environ) -> list[str]:
    """Return the variable of a job of Vertex AI in whose first two worker pools, which train the model, are several hosts."""
    try:
        config = read_json(environ.get("CLUSTER_SPEC", ""))
        pools = [_addresses(config["cluster"], name) for name in ("workerpool0", "workerpool1")]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return ["CLUSTER_SPEC"] if sum(map(len, pools)) > 1 else []


def _items(text: str) -> list[str]:
    return [item for item in re.split(r"[\s,\"\[\]]+", text) if item]


def _number(environ: Environ, name: str) -> int:
    """Return the value of a variable that is a small number, else -1."""
    value = environ.get(name, "")
    return int(value) if value.isdecimal() and int(value) < MAX_RANKS else -1


def _is_inherited(name: str, environ: Environ) -> bool:
    """Return whether a worker of Ray has inherited the variable from the process that started Ray on this host."""
    prefixes = ("OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "JSM_", "FLUX_", "SLURM_", "PALS_", "TPU_")
    return "RAY_RAYLET_PID" in environ and name.startswith(prefixes)
