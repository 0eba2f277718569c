"""Environment variables of one rank, as launchers set them: printed by a rank, or from the code of the launcher.

Only the variables that name ranks, sizes and jobs are kept, and those that could be taken for them.
"""

from __future__ import annotations

import json

TORCHRUN = {
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "37199", "RANK": "1", "ROLE_NAME": "default", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "e73b2821-aca8-4768-9582-f13b8aa2a039",
}  # fmt: skip

DEEPSPEED = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
"""Its launcher on each node. Its runners for MPI and Slurm leave the variables of mpiexec and srun."""

LIGHTNING_CHILD = {
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "38839", "NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"
}  # fmt: skip
"""A process that Lightning or Fabric starts, before launch() has made a process group. There is no RANK."""

PADDLE = {
    "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:35793", "PADDLE_DISTRI_BACKEND": "gloo", "PADDLE_GLOBAL_RANK": "1",
    "PADDLE_GLOBAL_SIZE": "2", "PADDLE_LOCAL_RANK": "1", "PADDLE_LOCAL_SIZE": "2", "PADDLE_MASTER": "127.0.0.1:35791",
    "PADDLE_NNODES": "1", "PADDLE_RANK_IN_NODE": "1", "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:35792,127.0.0.1:35793", "POD_NAME": "gjvqfj", "PADDLE_AUTO_CLUSTER": "0",
}  # fmt: skip

PADDLE_SERVER = {"TRAINING_ROLE": "PSERVER", "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "0"}

MSRUN = {
    "MS_WORKER_NUM": "4", "MS_NODE_ID": "2", "MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "10.0.0.1", "MS_SCHED_PORT": "8118",
    "RANK_SIZE": "4", "RANK_ID": "2", "DEVICE_ID": "2",
}  # fmt: skip

MSRUN_SCHEDULER = {name: value for name, value in MSRUN.items() if name != "MS_NODE_ID"} | {
    "MS_ROLE": "MS_SCHED",
    "RANK_ID": "0",
}

MSRUN_WITHOUT_NODE_RANK = MSRUN_SCHEDULER | {"MS_ROLE": "MS_WORKER"}
"""Without --node_rank a worker gets its rank in init(); the variable is that of the scheduler of its host."""

ASCEND = {"RANK_ID": "5", "RANK_SIZE": "8", "DEVICE_ID": "5", "RANK_TABLE_FILE": "/job/ranks.json"}
"""Set by a script that starts a process for each device of a rank table."""

MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}

INTEL_MPI = {
    "HYDRA_BSTRAP_NODE_ID": "0", "HYDRA_BSTRAP_PROXY_ID": "0", "HYDRA_BSTRAP_SUBTREE_SIZE": "1", "I_MPI_INFO_CACHES": "3",
    "I_MPI_INFO_CACHE_SIZE": "49152,2097152,503316480", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "11",
    "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip

OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_num_procs": "2", "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_WORLD_LOCAL_SIZE": "2", "OMPI_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-vm-22568@1", "PMIX_RANK": "1",
}  # fmt: skip

PRTERUN = {"PMIX_NAMESPACE": "prterun-vm-19467@1", "PMIX_RANK": "1", "PMIX_HOSTNAME": "vm", "PRTE_LAUNCHED": "1"}
"""PMIx without MPI: no variable has the number of ranks."""

MVAPICH = {
    "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2", "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4",
}  # fmt: skip

JSRUN = {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_LOCAL_RANK": "1", "LSB_JOBID": "9"}

FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f2", "FLUX_JOB_NNODES": "1"}

HOROVOD = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}  # fmt: skip

JAX = {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"}
MAXTEXT = {"JAX_PROCESS_INDEX": "1", "JAX_PROCESS_COUNT": "4", "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"}

SLURM_BATCH = {
    "SLURM_JOB_ID": "77", "SLURM_JOBID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GTIDS": "0", "SLURM_TASK_PID": "4711", "SLURM_ARRAY_TASK_ID": "3",
}  # fmt: skip
"""The batch script, and what it starts without srun: one process, although the job has eight tasks."""

SLURM_STEP = SLURM_BATCH | {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
"""A rank that srun has started."""

SLURM_INTERACTIVE = SLURM_STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
"""A shell or a notebook on a node: srun --pty, or salloc."""

RAY_WORKER = {"RAY_RAYLET_PID": "21362", "RAY_JOB_ID": "01000000"}
"""A worker of Ray. It also inherits the variables of the process that started Ray on its host."""

XDIST = {"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "4", "PYTEST_XDIST_TESTRUNUID": "85f1"}

SHELL = {
    "HOME": "/root", "SHLVL": "3", "COLUMNS": "80", "HISTSIZE": "1000", "XDG_SESSION_ID": "4", "WINDOWID": "12345",
    "OMP_NUM_THREADS": "8", "JPY_PARENT_PID": "99", "JPY_SESSION_NAME": "a.ipynb",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    "ACCELERATE_USE_CPU": "True", "LSB_JOBID": "9", "PBS_NUM_PPN": "4",
}  # fmt: skip
"""A shell, a notebook and a pod, with variables that other programs set."""


def cluster_spec(kind: str, index: int, **cluster: int) -> dict[str, str]:
    """Return the CLUSTER_SPEC of a replica of Vertex AI; cluster: the number of replicas of each worker pool."""
    pools = {name: [f"{name}-{i}:2222" for i in range(count)] for name, count in cluster.items()}
    return {"CLUSTER_SPEC": json.dumps({"cluster": pools, "environment": "cloud", "task": {"type": kind, "index": index}})}


def tf_config(kind: str, index: int, **cluster: int) -> dict[str, str]:
    """Return the TF_CONFIG of a task; cluster: the number of tasks of each kind."""
    tasks = {name: [f"{name}{i}.example.org:2222" for i in range(count)] for name, count in cluster.items()}
    return {"TF_CONFIG": json.dumps({"cluster": tasks, "task": {"type": kind, "index": index}})}
