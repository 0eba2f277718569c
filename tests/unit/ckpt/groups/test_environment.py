"""The group that environment variables describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.messages import one_line
from programs import rendezvous_rank

from ckpt.errors import GroupError
from ckpt.groups import EnvGroup, SingleProcessGroup, as_group, detect
from ckpt.groups.env import rank_from_env

SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "run"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4, "environment (RANK, WORLD_SIZE)", False)),
        (TORCHRUN, (1, 4, "environment (RANK, WORLD_SIZE)", True)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, (1, 4, "environment (RANK, WORLD_SIZE)", False)),
        (SLURM | TORCHRUN, (1, 4, "environment (RANK, WORLD_SIZE)", True)),  # torchrun, started by Slurm
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            (0, 2, "environment (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)", False),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, "environment (PMI_RANK, PMI_SIZE)", False)),
        (SLURM, (3, 8, "environment (SLURM_PROCID, SLURM_STEP_NUM_TASKS)", True)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}, None),  # the batch script itself
        ({"RANK": "0", "WORLD_SIZE": "2", "CKPT_RUN_ID": "mine"}, (0, 2, "environment (RANK, WORLD_SIZE)", True)),
    ],
)
def test_variables_of_launchers_give_rank_size_and_job(environ: dict[str, str], expected: Any) -> None:
    rank = rank_from_env(environ)
    assert (rank and (rank.rank, rank.size, rank.name, rank.job_id.is_named)) == expected


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("one", "4"), ("0", ""), ("0", "0")])
def test_malformed_variables_are_refused(rank: str, size: str) -> None:
    with pytest.raises(GroupError) as raised:
        rank_from_env({"RANK": rank, "WORLD_SIZE": size})
    one_line(raised, f"RANK={rank} and WORLD_SIZE={size}", "group=None")


def test_the_job_id_is_the_same_on_all_ranks_and_differs_between_jobs() -> None:
    """It is the same on any node, and another for each other job and restart."""

    def job(environ: dict[str, str], **more: str) -> str:
        rank = rank_from_env(environ | more)
        assert rank is not None
        return rank.job_id.digest

    slurm = job(SLURM)
    assert job(SLURM, SLURM_PROCID="4", SLURM_NODEID="1") == slurm
    others = [job(SLURM, **{name: "9"}) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    assert len({slurm, *others}) == 4
    # Each agent of torchrun counts its own restarts, so nodes of one job differ.
    assert job(TORCHRUN, TORCHELASTIC_RESTART_COUNT="1", RANK="0") == job(TORCHRUN, TORCHELASTIC_RESTART_COUNT="0")
    assert job(TORCHRUN, TORCHELASTIC_RUN_ID="other") != job(TORCHRUN)
    assert job(TORCHRUN, CKPT_RUN_ID="mine") == job(SLURM, CKPT_RUN_ID="mine") != job(TORCHRUN)


def test_without_variables_the_group_is_one_process() -> None:
    assert isinstance(detect(), SingleProcessGroup)
    assert isinstance(as_group(), SingleProcessGroup)


def test_a_job_of_one_rank_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(detect(), SingleProcessGroup)


def test_a_job_of_many_ranks_has_an_environment_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.groups.detection._env_groups", {})
    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    group = as_group("auto")
    assert isinstance(group, EnvGroup)
    assert repr(group) == "environment (RANK, WORLD_SIZE), rank 2 of 3"
    assert as_group("auto") is group
    assert isinstance(as_group(None), SingleProcessGroup)
    monkeypatch.setenv("RANK", "1")
    assert as_group("auto").rank == 1


def test_a_torch_group_takes_precedence_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    from ckpt.groups.torch import TorchGroup

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert isinstance(detect(), SingleProcessGroup)
        rendezvous_rank.check(as_group(dist.group.WORLD), 1000)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        assert TorchGroup().can_exchange
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
        on_device = TorchGroup()
        assert str(on_device._device) == "cuda:3"
        assert not on_device.can_exchange
    finally:
        dist.destroy_process_group()


def test_a_dimension_of_a_torch_device_mesh_always_gives_the_same_group(tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        group = as_group(mesh["dp"])  # a new mesh object at each access
        assert as_group(mesh["dp"]) is group
        assert as_group(mesh["dp"].get_group()) is group
    finally:
        dist.destroy_process_group()


def test_an_environment_group_needs_its_variables() -> None:
    with pytest.raises(GroupError, match="set RANK and WORLD_SIZE"):
        EnvGroup()
