"""Every group exchanges bytes in the same ways, whoever starts its ranks."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from helpers.messages import one_line
from helpers.processes import finish
from helpers.rendezvous import PROGRAM, launch, rank_process, reports, run_in_threads
from helpers.repositories import files
from programs import rendezvous_rank

from ckpt.errors import GroupError
from ckpt.groups import SingleProcessGroup, as_group
from ckpt.groups.threads import ThreadGroup
from ckpt.storage.base.errors import InvalidArgument


def test_ranks_of_mpi_exchange_bytes(tmp_path: Path) -> None:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    finish(launch(mpiexec, "-n", 4, sys.executable, PROGRAM, "mpi", tmp_path))
    assert reports(tmp_path, 4) == [[f"MPI, rank {rank} of 4"] for rank in range(4)]


def test_ranks_of_torchrun_exchange_bytes(tmp_path: Path) -> None:
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4)
    finish(launch(sys.executable, *run, PROGRAM, "torch", tmp_path))
    names = ("environment (RANK, WORLD_SIZE)", "torch.distributed")
    assert reports(tmp_path, 4) == [[f"{name}, rank {rank} of 4" for name in names] for rank in range(4)]
    assert not files(tmp_path / "repository"), "the rendezvous is over"


def test_ranks_of_jax_exchange_bytes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"WORLD_SIZE": 2, "JAX_PLATFORMS": "cpu"}
    ranks = [launch(sys.executable, PROGRAM, "jax", tmp_path, port, RANK=rank, **env) for rank in range(2)]
    for rank in ranks:
        finish(rank)
    assert reports(tmp_path, 2) == [[f"jax.distributed, rank {rank} of 2"] for rank in range(2)]


def test_ranks_of_the_environment_exchange_bytes(tmp_path: Path) -> None:
    ranks = [rank_process(tmp_path, rank, 4, LARGE=5_000_000) for rank in range(4)]
    for rank in ranks:
        finish(rank)
    assert reports(tmp_path, 4) == [[f"environment (RANK, WORLD_SIZE), rank {rank} of 4"] for rank in range(4)]
    assert not files(tmp_path / "repository"), "the rendezvous is over"


def test_a_single_process_exchanges_bytes_with_itself() -> None:
    rendezvous_rank.check(SingleProcessGroup(), 1000)


def test_ranks_that_are_threads_exchange_bytes() -> None:
    assert run_in_threads(*(lambda g=g: rendezvous_rank.check(g, 100_000) for g in ThreadGroup.make(4))) == [None] * 4


def test_missing_threads_are_named() -> None:
    groups = ThreadGroup.make(4, timeout=0.2)
    errors = run_in_threads(*(lambda g=g: g.all_gather(b"") for g in groups[1:3]))
    for rank, error in enumerate(errors, 1):
        assert isinstance(error, GroupError)
        one_line(error, f"threads, rank {rank} of 4", "ranks 0, 3 did not join a gather within 0.2 s")
    with pytest.raises(GroupError, match="rank 3 did not join"):
        groups[0].exchange([], [(3, memoryview(bytearray(1)))])
    groups[3].exchange([(0, memoryview(b"four"))], [])
    with pytest.raises(GroupError, match="rank 3 sent 4 bytes where 1 were expected"):
        groups[0].exchange([], [(3, memoryview(bytearray(1)))])


def test_an_exchange_with_an_unknown_rank_is_refused() -> None:
    for peer in (-1, 4):
        with pytest.raises(InvalidArgument, match=f"there is no rank {peer} in threads, rank 0 of 4"):
            ThreadGroup.make(4)[0].exchange([(peer, memoryview(b"1"))], [])


def test_a_broadcast_without_data_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="rank 0 must give the data"):
        SingleProcessGroup().broadcast(None)


def test_an_error_of_a_library_becomes_a_group_error_of_one_line() -> None:
    with pytest.raises(GroupError) as raised, SingleProcessGroup()._as_group_error("a gather"):
        raise RuntimeError("[/src/gloo/pair.cc:1] Timed out for faulty rank.\nframe #0: c10::Error")
    one_line(raised, "a gather failed: Timed out for faulty rank; check whether a rank has died")


def test_ranks_find_out_whether_they_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ThreadGroup.make(3)
    hosts = iter((b"a", b"a", b"b"))
    monkeypatch.setattr("ckpt.groups.base._host_identity", lambda: next(hosts))
    assert run_in_threads(*(g.one_host for g in groups)) == [False] * 3
    assert run_in_threads(*(g.one_host for g in groups)) == [False] * 3, "the answer is cached"


def test_a_group_is_accepted_as_it_is() -> None:
    group = ThreadGroup.make(2)[1]
    assert as_group(group) is group


@pytest.mark.parametrize("wrong", ["mpi", 3, [0, 1], object()])
def test_an_object_that_is_no_group_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="'auto', None"):
        as_group(wrong)
