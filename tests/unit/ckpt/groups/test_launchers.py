"""Which rank, size and job the variables of each launcher give, and which processes look like one of many."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import launcher_environments as env
from helpers.launcher_environments import tf_config
from helpers.messages import one_line

import ckpt
from ckpt.errors import GroupError
from ckpt.groups import EnvGroup, SingleProcessGroup, detect
from ckpt.groups.launchers import rank_from_env, signs_of_other_ranks
from ckpt.saving import lone_rank_warning

RANKS = {
    "torchrun": (env.TORCHRUN, 1, 2, "RANK", True),
    "torchrun in a step of Slurm": (env.SLURM_STEP | env.TORCHRUN | {"WORLD_SIZE": "16"}, 1, 16, "RANK", True),
    "a torchrun for each task of Slurm": (env.SLURM_STEP | env.TORCHRUN, 1, 2, "RANK", True),
    "deepspeed": (env.DEEPSPEED, 3, 4, "RANK", False),
    "paddle": (env.PADDLE, 1, 2, "PADDLE_TRAINER_ID", False),
    "paddle with a job id": (env.PADDLE | {"PADDLE_JOB_ID": "mine"}, 1, 2, "PADDLE_TRAINER_ID", True),
    "msrun": (env.MSRUN, 2, 4, "MS_NODE_ID", False),
    "older msrun": ({k: v for k, v in env.MSRUN.items() if k[:4] != "RANK"}, 2, 4, "MS_NODE_ID", False),
    "ascend": (env.ASCEND, 5, 8, "RANK_ID", False),
    "mindspore under Open MPI": (env.OPEN_MPI | {"RANK_ID": "1", "RANK_SIZE": "2"}, 1, 2, "RANK_ID", False),
    "jax": (env.JAX, 1, 4, "JAX_PROCESS_ID", False),
    "maxtext": (env.MAXTEXT, 1, 4, "JAX_PROCESS_INDEX", False),
    "horovod": (env.HOROVOD, 1, 4, "HOROVOD_RANK", False),
    "mpich": (env.MPICH, 1, 2, "PMI_RANK", False),
    "deepspeed by mpich": (env.MPICH | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, 1, 2, "RANK", False),
    "intel mpi": (env.INTEL_MPI, 1, 2, "PMI_RANK", False),
    "mpich in a step of Slurm, with a proxy on each node": (
        env.SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | env.MPICH | {"PMI_SIZE": "8", "PMI_RANK": "5"},
        5, 8, "PMI_RANK", False,
    ),
    "open mpi": (env.OPEN_MPI, 1, 2, "OMPI_COMM_WORLD_RANK", True),
    "mvapich": (env.MVAPICH, 3, 4, "MV2_COMM_WORLD_RANK", False),
    "jsrun": (env.JSRUN, 3, 6, "JSM_NAMESPACE_RANK", True),
    "flux": (env.FLUX, 1, 4, "FLUX_TASK_RANK", True),
    "slurm": (env.SLURM_STEP, 3, 8, "SLURM_PROCID", True),
    "slurm with pmix": (env.SLURM_STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.77.0"}, 3, 8, "SLURM_PROCID", True),
    "chief of tensorflow": (tf_config("chief", 0, chief=1, worker=3, evaluator=1), 0, 4, "TF_CONFIG", False),
    "worker beside a chief": (tf_config("worker", 0, chief=1, worker=3), 1, 4, "TF_CONFIG", False),
    "worker without a chief": (tf_config("worker", 2, worker=3), 2, 3, "TF_CONFIG", False),
    "tensorflow in a step of Slurm": (env.SLURM_STEP | tf_config("worker", 2, worker=8), 2, 8, "TF_CONFIG", False),
    "ray train with torch on Slurm": (env.SLURM_STEP | env.RAY_WORKER | env.DEEPSPEED, 3, 4, "RANK", False),
}  # fmt: skip

ALONE = {
    "shell": env.SHELL,
    "batch script of Slurm": env.SLURM_BATCH,
    "shell on a node of Slurm": env.SLURM_INTERACTIVE,
    "pytest-xdist": env.XDIST,
    "worker of Ray on a host of Slurm": env.SLURM_STEP | env.RAY_WORKER,
    "worker of Ray below Open MPI": env.OPEN_MPI | env.RAY_WORKER,
    "one rank of torchrun": env.TORCHRUN | dict.fromkeys(
        ("RANK", "LOCAL_RANK", "ROLE_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1"),
    "one rank of mpiexec": env.MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    "evaluator of tensorflow": tf_config("evaluator", 0, chief=1, worker=3, evaluator=1),
    "parameter server of tensorflow": tf_config("ps", 1, chief=1, worker=3, ps=2),
    "chief beside parameter servers": tf_config("chief", 0, chief=1, worker=3, ps=2),
    "one worker of tensorflow": tf_config("worker", 0, worker=1),
    "parameter server of paddle": env.PADDLE_SERVER,
    "array job of Slurm": {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"},
    "array job of AWS Batch": {"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "8"},
    "indexed job without an address": {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    "one host of SageMaker": {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    "one host of Vertex": env.cluster_spec("workerpool0", 0, workerpool0=1),
    "one host of Vertex with an evaluator": env.cluster_spec("workerpool0", 0, workerpool0=1, workerpool3=1),
    "one host with a TPU": {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
    "worker of Ray on a host with a TPU": {"TPU_WORKER_HOSTNAMES": "a,b"} | env.RAY_WORKER,
    "parallel job of a CI": {"CI_NODE_INDEX": "2", "CI_NODE_TOTAL": "4", "CIRCLE_NODE_INDEX": "1", "CIRCLE_NODE_TOTAL": "4"},
    "workers of a data loader": {"WORKER_ID": "0", "NUM_WORKERS": "1", "DATALOADER_NUM_WORKERS": "8"},
    "malformed lists": {"SM_HOSTS": "", "CLUSTER_SPEC": "[]", "PROCESS_ID": "x", "NUM_PROCESSES": "2"},
    "empty TF_CONFIG": {"TF_CONFIG": ""},
    "TF_CONFIG without a cluster": {"TF_CONFIG": "{}"},
    "words and numbers that are not ranks": {"A_RANK": "high", "B_RANK": "-1", "PAGE_RANK": "0", "SHARD_SIZE": "512"},
}  # fmt: skip

SIGNS = {
    "child of Lightning": (env.LIGHTNING_CHILD, ["LOCAL_RANK=1", "WORLD_SIZE=2"]),
    "first process of Lightning": (env.LIGHTNING_CHILD | {"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "WORLD_SIZE=2"]),
    "prterun": (env.PRTERUN, ["PMIX_RANK=1"]),
    "worker of msrun without a rank": (env.MSRUN_WITHOUT_NODE_RANK, ["RANK_ID=0", "RANK_SIZE=4"]),
    "scheduler of msrun": (env.MSRUN_SCHEDULER, ["RANK_ID=0", "RANK_SIZE=4"]),
    "an unknown launcher": ({"GALAXY_RANK": "0", "GALAXY_SIZE": "16"}, ["GALAXY_RANK=0", "GALAXY_SIZE=16"]),
    "an unknown launcher, rank only": ({"GALAXY_TASK_RANK": "2"}, ["GALAXY_TASK_RANK=2"]),
    "pals": ({"PALS_RANKID": "0", "PALS_SIZE": "4"}, ["PALS_RANKID=0", "PALS_SIZE=4"]),
    "second process of a node": ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1"]),
    "script for jax": ({"PROCESS_ID": "0", "NUM_PROCESSES": "4"}, ["PROCESS_ID=0", "NUM_PROCESSES=4"]),
    "script for jax with other names": ({"PROCESS_INDEX": "2", "PROCESS_COUNT": "4"}, ["PROCESS_INDEX=2", "PROCESS_COUNT=4"]),
    "torchrun by variables": ({"PET_NODE_RANK": "0", "PET_NNODES": "2"}, ["PET_NODE_RANK=0", "PET_NNODES=2"]),
    "skypilot": ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}, ["SKYPILOT_NODE_RANK=0", "SKYPILOT_NUM_NODES=2"]),
    "nodes of AWS Batch": (
        {"AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_NUM_NODES": "2"},
        ["AWS_BATCH_JOB_NODE_INDEX=0", "AWS_BATCH_JOB_NUM_NODES=2"],
    ),
    "byteps": ({"DMLC_WORKER_ID": "0", "DMLC_NUM_WORKER": "2"}, ["DMLC_WORKER_ID=0", "DMLC_NUM_WORKER=2"]),
    "leader of a LeaderWorkerSet": (
        {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "2"},
        ["LWS_WORKER_INDEX=0", "LWS_GROUP_SIZE=2"],
    ),
    "volcano": ({"VC_TASK_INDEX": "0", "VC_WORKER_NUM": "2"}, ["VC_TASK_INDEX=0", "VC_WORKER_NUM=2"]),
    "slices of TPUs": (
        {"MEGASCALE_SLICE_ID": "0", "MEGASCALE_NUM_SLICES": "2"},
        ["MEGASCALE_SLICE_ID=0", "MEGASCALE_NUM_SLICES=2"],
    ),
    "hosts with TPUs": ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3"}, ["TPU_WORKER_HOSTNAMES"]),
    "sagemaker": ({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}, ["SM_HOSTS"]),
    "vertex": (env.cluster_spec("workerpool0", 0, workerpool0=1, workerpool1=3), ["CLUSTER_SPEC"]),
    "neuron": (
        {"NEURON_PJRT_PROCESS_INDEX": "0", "NEURON_PJRT_PROCESSES_NUM_DEVICES": "64,64"},
        ["NEURON_PJRT_PROCESSES_NUM_DEVICES"],
    ),
    "indexed job with a coordinator": (
        {"JOB_COMPLETION_INDEX": "0", "JAX_COORDINATOR_ADDRESS": "job-0.svc:1234"},
        ["JOB_COMPLETION_INDEX=0", "JAX_COORDINATOR_ADDRESS"],
    ),
    "indexed job with a master": ({"MASTER_ADDR": "job-0.svc"}, ["JOB_COMPLETION_INDEX=3", "MASTER_ADDR"]),
}


@pytest.mark.parametrize(("environ", "rank", "size", "variable", "is_named"), RANKS.values(), ids=RANKS)
def test_each_launcher_gives_rank_size_and_job(
    environ: dict[str, str], rank: int, size: int, variable: str, is_named: bool
) -> None:
    found = rank_from_env(environ)
    assert found is not None
    assert (found.rank, found.size, found.job_id.is_named) == (rank, size, is_named)
    assert f"({variable}" in found.name
    assert signs_of_other_ranks(environ), "were this group not detected, the process would be recognised as one of many"


@pytest.mark.parametrize("environ", ALONE.values(), ids=ALONE)
def test_an_ordinary_process_is_alone_without_a_sign_of_others(environ: dict[str, str]) -> None:
    found = rank_from_env(environ)
    assert found is None or found.size == 1
    assert signs_of_other_ranks(environ) == []


@pytest.mark.parametrize(("environ", "signs"), SIGNS.values(), ids=SIGNS)
def test_a_process_without_a_known_rank_has_signs_of_others(environ: dict[str, str], signs: list[str]) -> None:
    assert rank_from_env(environ) is None
    assert signs_of_other_ranks(env.SHELL | environ) == signs


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            env.MPICH | {"RANK": "0", "WORLD_SIZE": "1"},
            ("rank 0 of 1", "rank 1 of 2", "RANK, WORLD_SIZE", "PMI_RANK, PMI_SIZE"),
        ),
        (env.TORCHRUN | env.MPICH | {"RANK": "0", "WORLD_SIZE": "1"}, ("rank 0 of 1", "rank 1 of 2")),  # by ckpt-run -- mpiexec
        (env.SLURM_STEP | env.DEEPSPEED, ("rank 3 of 4", "rank 3 of 8", "SLURM_STEP_NUM_TASKS")),
        (env.OPEN_MPI | tf_config("worker", 0, worker=1), ("TF_CONFIG", "rank 1 of 2")),
    ],
)
def test_launchers_that_contradict_each_other_are_refused(environ: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(GroupError) as raised:
        rank_from_env(environ)
    one_line(raised, "contradicts", "unset", "group=", *words)


@pytest.mark.parametrize("config", ["{", "[]", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "1",
                                    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "x"}}'])  # fmt: skip
def test_a_malformed_description_of_a_cluster_is_refused(config: str) -> None:
    with pytest.raises(GroupError) as raised:
        rank_from_env({"TF_CONFIG": config})
    one_line(raised, "TF_CONFIG", "group=None")
    assert signs_of_other_ranks({"TF_CONFIG": config}) == []


def test_a_sparse_cluster_of_tensorflow_counts_its_workers() -> None:
    config = '{"cluster": {"worker": {"0": "a:1", "1": "b:1", "10": "c:1"}}, "task": {"type": "worker", "index": 1}}'
    found = rank_from_env({"TF_CONFIG": config})
    assert found is not None
    assert (found.rank, found.size) == (1, 3)


@pytest.mark.parametrize(
    ("environ", "others"),
    [
        (env.PADDLE, [{"PADDLE_MASTER": "127.0.0.1:1"}, {"PADDLE_JOB_ID": "other"}]),
        (env.MSRUN, [{"MS_SCHED_PORT": "8119"}]),
        (env.JAX, [{"JAX_COORDINATOR_ADDRESS": "10.0.0.2:1"}]),
        (env.OPEN_MPI, [{"PMIX_NAMESPACE": "prterun-vm-1@1"}]),
        (
            tf_config("worker", 1, worker=2),
            [{"TF_CONFIG": tf_config("worker", 1, worker=2)["TF_CONFIG"].replace("example", "x")}],
        ),
        (env.FLUX, [{"FLUX_JOB_ID": "f3"}]),
    ],
)
def test_the_job_id_differs_between_jobs_and_not_between_ranks(environ: dict[str, str], others: list[dict[str, str]]) -> None:
    def digest(**more: str) -> str:
        found = rank_from_env(environ | more)
        assert found is not None
        return found.job_id.digest

    assert len({digest(), *(digest(**other) for other in others)}) == 1 + len(others)
    rank = next(name for name in environ if name.endswith(("RANK", "RANK_ID", "TRAINER_ID", "PROCESS_ID", "NODE_ID", "CONFIG")))
    assert digest(**({rank: "0"} if rank != "TF_CONFIG" else tf_config("worker", 0, worker=2))) == digest()


# --- initialised libraries -------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return a way to set the environment of this process, which has no variables of a launcher."""
    for name in env.TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ckpt.groups.detection._env_groups", {})
    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.setattr(lone_rank_warning, "_has_warned", False)
    return monkeypatch


def set_all(environment: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)


def library(name: str, rank: Any, size: Any, is_initialized: bool = True) -> tuple[str, types.SimpleNamespace]:
    """Return the name of a module and a stand-in for it, with the functions that ckpt calls."""
    context = types.SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: size, get_experiment_name=lambda: "run")
    return {
        "paddle": ("paddle.distributed", types.SimpleNamespace(
            is_initialized=lambda: is_initialized, get_rank=lambda: rank, get_world_size=lambda: size)),
        "mindspore": ("mindspore.communication", types.SimpleNamespace(
            GlobalComm=types.SimpleNamespace(INITED=is_initialized), get_rank=lambda: rank, get_group_size=lambda: size)),
        "ray": ("ray.train", types.SimpleNamespace(get_context=(lambda: context) if is_initialized else lambda: 1 / 0)),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ["paddle", "mindspore", "ray"])
def test_an_initialised_library_takes_precedence_over_the_environment(name: str, environment: pytest.MonkeyPatch) -> None:
    set_all(environment, env.RAY_WORKER | env.DEEPSPEED)
    environment.setitem(sys.modules, *library(name, 1, 2))
    group = detect()
    assert isinstance(group, EnvGroup)
    assert (group.rank, group.size) == (1, 2)
    assert group is detect()
    environment.setitem(sys.modules, *library(name, 1, 2, is_initialized=False))
    assert (detect().rank, detect().size) == (3, 4)
    environment.setitem(sys.modules, *library(name, 0, 1))
    assert (detect().rank, detect().size) == (3, 4)


def test_a_module_that_is_being_imported_is_not_used(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, env.RAY_WORKER)
    for name in ("paddle.distributed", "mindspore.communication", "ray.train"):
        environment.setitem(sys.modules, name, types.ModuleType(name))
    assert isinstance(detect(), SingleProcessGroup)


# --- the warning -----------------------------------------------------------------------------------------------


def test_a_process_that_looks_like_one_of_many_and_saves_alone_is_warned_once(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    set_all(environment, env.LIGHTNING_CHILD)
    state = {"a": np.arange(3)}
    with pytest.warns(UserWarning, match=r"LOCAL_RANK=1, WORLD_SIZE=2.*group=") as caught:
        ckpt.save(state, tmp_path / "one", step=1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.Checkpointer(tmp_path / "two").close()
        environment.setattr(lone_rank_warning, "_has_warned", False)
        ckpt.load(tmp_path / "one")
        ckpt.save(state, tmp_path / "one", step=2, group=None)
    with pytest.warns(UserWarning, match=r"LOCAL_RANK=1, WORLD_SIZE=2.*group="):
        ckpt.Checkpointer(tmp_path / "two").close()


def test_a_library_with_one_process_in_a_job_of_many_is_warned(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    set_all(environment, env.MPICH)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.warns(UserWarning, match="PMI_RANK=1, PMI_SIZE=2"):
            ckpt.save({"a": np.arange(3)}, tmp_path / "run", step=1)
    finally:
        dist.destroy_process_group()
