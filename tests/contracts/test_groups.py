"""Every group exchanges bytes in the same ways, whoever starts its ranks."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from helpers.meetings import PROGRAM, launch, rank_process, reports, together
from helpers.messages import one_line
from helpers.processes import finish
from helpers.repositories import files
from programs import meeting_rank

from ckpt.errors import GroupError
from ckpt.groups import SingleProcessGroup, as_group
from ckpt.groups.threads import ThreadGroup
from ckpt.storage.base.errors import InvalidArgument


def test_mpi(tmp_path: Path) -> None:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    finish(launch(mpiexec, "-n", 4, sys.executable, PROGRAM, "mpi", tmp_path))
    assert reports(tmp_path, 4) == [[f"MPI, rank {rank} of 4"] for rank in range(4)]


def test_torch(tmp_path: Path) -> None:
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4)
    finish(launch(sys.executable, *run, PROGRAM, "torch", tmp_path))
    names = ("environment (RANK, WORLD_SIZE)", "torch.distributed")
    assert reports(tmp_path, 4) == [[f"{name}, rank {rank} of 4" for name in names] for rank in range(4)]
    assert not files(tmp_path / "repository"), "the meeting is over"


def test_jax(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"WORLD_SIZE": 2, "JAX_PLATFORMS": "cpu"}
    ranks = [launch(sys.executable, PROGRAM, "jax", tmp_path, port, RANK=rank, **env) for rank in range(2)]
    for rank in ranks:
        finish(rank)
    assert reports(tmp_path, 2) == [[f"jax.distributed, rank {rank} of 2"] for rank in range(2)]


def test_environment_only(tmp_path: Path) -> None:
    ranks = [rank_process(tmp_path, rank, 4, LARGE=5_000_000) for rank in range(4)]
    for rank in ranks:
        finish(rank)
    assert reports(tmp_path, 4) == [[f"environment (RANK, WORLD_SIZE), rank {rank} of 4"] for rank in range(4)]
    assert not files(tmp_path / "repository"), "the meeting is over"


def test_alone() -> None:
    meeting_rank.check(SingleProcessGroup(), 1000)


def test_threads() -> None:
    assert together(*(lambda g=g: meeting_rank.check(g, 100_000) for g in ThreadGroup.make(4))) == [None] * 4


def test_threads_that_are_missing() -> None:
    groups = ThreadGroup.make(4, timeout=0.2)
    told = together(*(lambda g=g: g.all_gather(b"") for g in groups[1:3]))
    for rank, error in enumerate(told, 1):
        assert isinstance(error, GroupError)
        one_line(error, f"threads, rank {rank} of 4", "ranks 0, 3 did not join a gather within 0.2 s")
    with pytest.raises(GroupError, match="rank 3 did not join"):
        groups[0].exchange([], [(3, memoryview(bytearray(1)))])
    groups[3].exchange([(0, memoryview(b"four"))], [])
    with pytest.raises(GroupError, match="rank 3 sent 4 bytes where 1 were expected"):
        groups[0].exchange([], [(3, memoryview(bytearray(1)))])


def test_no_such_rank() -> None:
    for peer in (-1, 4):
        with pytest.raises(InvalidArgument, match=f"there is no rank {peer} in threads, rank 0 of 4"):
            ThreadGroup.make(4)[0].exchange([(peer, memoryview(b"1"))], [])


def test_a_broadcast_of_nothing() -> None:
    with pytest.raises(InvalidArgument, match="rank 0 must give the data"):
        SingleProcessGroup().broadcast(None)


def test_what_a_library_says_goes_on_as_our_sentence() -> None:
    with pytest.raises(GroupError) as told, SingleProcessGroup()._as_group_error("a gather"):
        raise RuntimeError("[/src/gloo/pair.cc:1] Timed out for faulty rank.\nframe #0: c10::Error")
    one_line(told, "a gather failed: Timed out for faulty rank; check whether a rank has died")


def test_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ThreadGroup.make(3)
    hosts = iter((b"a", b"a", b"b"))
    monkeypatch.setattr("ckpt.groups.base._host_identity", lambda: next(hosts))
    assert together(*(g.one_host for g in groups)) == [False] * 3
    assert together(*(g.one_host for g in groups)) == [False] * 3, "asked once"


def test_a_group_is_a_group() -> None:
    group = ThreadGroup.make(2)[1]
    assert as_group(group) is group


@pytest.mark.parametrize("wrong", ["mpi", 3, [0, 1], object()])
def test_what_is_no_group(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="'auto', None"):
        as_group(wrong)
