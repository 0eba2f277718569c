"""One rank of a real group: it exchanges bytes in every way that its group has, and reports which groups it found.

    rendezvous_rank.py mpi|torch|jax|env FOLDER [PORT]

The report, FOLDER/<rank>.json, has the groups that were found. A rank that finds an error ends with an assertion.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.errors import GroupError
from ckpt.groups import EnvGroup, Group, SingleProcessGroup, as_group, dead_ranks, detect
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.local.directory import LocalStore


def content(rank: int, number: int, nbytes: int) -> bytes:
    """Return the bytes that a rank brings to a gather; every rank can compute them."""
    return np.random.default_rng([rank, number, nbytes]).bytes(nbytes)


def check(group: Group, large: int = 5_000_000) -> None:
    """Check the contract of a group, as each rank of it runs it."""
    rank, size = group.rank, group.size
    lengths: tuple[Any, ...] = (
        lambda r: 10,
        lambda r: 0,
        lambda r: 1 + 7 * r,
        lambda r: 0 if r == 0 else 100,
        lambda r: large if r == size - 1 else r,
        lambda r: large + r,
    )
    for number, length in enumerate(lengths):
        got = group.all_gather(content(rank, number, length(rank)))
        assert all(type(data) is bytes for data in got)
        assert [*map(len, got)] == [length(r) for r in range(size)]
        assert got == [content(r, number, length(r)) for r in range(size)], number
    for number, nbytes in enumerate((0, 1, large)):
        given = content(0, number, nbytes) if rank == 0 else None if number else b"ignored"
        assert group.broadcast(given) == content(0, number, nbytes)
    assert group.one_host()
    if group.can_exchange:
        check_exchange(group, large)
        group.exchange([], [])
    else:
        try:
            group.exchange([], [])
        except InvalidArgument as error:
            assert group.name in str(error)
        else:
            raise AssertionError("exchange() works in a group without it")


def check_exchange(group: Group, large: int) -> None:
    """Exchange several messages between each two ranks, both ways, also to itself and of no bytes; the last rank sends none."""
    rank, size = group.rank, group.size

    def messages(source: int, target: int) -> list[bytes]:
        if source == size - 1 and size > 1:
            return []
        return [content(source, 100 * target + i, n) for i, n in enumerate((1000 + source, 0, 3, 1000 + source, large))]

    # Interleaved, so that messages of other pairs are between those of one pair.
    rounds = max(len(messages(0, r)) for r in range(size))
    send, receive, expected = [], [], []
    for i in range(rounds):
        for peer in range(size):
            for message in messages(rank, peer)[i : i + 1]:
                # From writable memory, read-only memory, and memory of another shape.
                square = len(message) % 4 == 0 and i == 0
                send.append(
                    (peer, memoryview(np.frombuffer(message, "u4") if square else bytearray(message) if i % 2 else message))
                )
            for message in messages(peer, rank)[i : i + 1]:
                receive.append((peer, memoryview(np.zeros(len(message), np.uint8))))
                expected.append(message)
    group.exchange(send, receive)
    assert [bytes(data) for _, data in receive] == expected


def refused(group: Any, *words: str) -> None:
    """Fail unless `group` is refused as a group with an error of these words."""
    try:
        as_group(group)
    except InvalidArgument as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"{group!r} is taken as a group")


def fails(call: Callable[[], Any], *words: str) -> None:
    """Fail unless `call` raises a GroupError with these words and a cause."""
    try:
        call()
    except GroupError as error:
        assert all(word in str(error) for word in words), error
        assert "\n" not in str(error), error
        assert error.__cause__ is not None
    else:
        raise AssertionError(f"no GroupError of {words}")


# --- by library ------------------------------------------------------------------------------------------------


def in_mpi(folder: Path) -> list[Group]:
    from mpi4py import MPI

    from ckpt.groups import mpi as mpi_group

    world = MPI.COMM_WORLD
    buffer = np.zeros(1, np.uint8)
    pending = world.Irecv(buffer, MPI.ANY_SOURCE, MPI.ANY_TAG)  # a request of the user: no message of ckpt may arrive in it
    os.environ |= {"RANK": "0", "WORLD_SIZE": "64"}  # MPI takes precedence over these variables
    group = detect()
    assert group is detect()
    assert group is as_group(world)
    check(group)
    mpi_group.MESSAGE_PIECE_BYTES = 70_001
    check(group, 300_000)
    assert not pending.Test()
    pending.Cancel()
    pending.Wait()
    half = world.Split(world.rank % 2, -world.rank)  # ranks in reverse order
    part = as_group(half)
    assert (part.rank, part.size) == (half.rank, 2)
    check(part, 1000)
    part.close()
    refused(MPI.COMM_NULL, "COMM_WORLD")
    half.Free()
    assert as_group(half) is part
    fails(lambda: part.all_gather(b""), "MPI, rank", "a gather failed")
    return [group]


def in_torch(folder: Path) -> list[Group]:
    import torch.distributed as dist

    before = detect()  # torch is imported, but not initialised: the environment of the launcher decides
    assert isinstance(before, EnvGroup)
    assert before is detect()
    before.meet_at(LocalStore(folder / "repository"))
    check(before, 1000)

    dist.init_process_group("gloo")
    group = detect()
    assert group is detect()
    assert group is as_group(dist.group.WORLD)
    check(group)
    from ckpt.groups import torch as torch_group

    torch_group.MESSAGE_PIECE_BYTES = 70_001
    check(group, 300_000)
    rank = dist.get_rank()
    odd = dist.new_group([1, 3])
    if rank % 2:
        part = as_group(odd)
        assert (part.rank, part.size) == (rank // 2, 2)
        check(part, 1000)
    else:
        refused(odd, "not in the process group")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    refused(mesh, "2 dimensions", "mesh[")
    check(as_group(mesh["tp"]), 1000)
    check(as_group(dist.init_device_mesh("cpu", (4,))), 1000)
    impatient = as_group(dist.new_group(range(4), timeout=datetime.timedelta(seconds=0.5)))
    named = as_group(dist.new_group(range(4), timeout=datetime.timedelta(seconds=5)))
    if rank < 3:
        failed_ranks = ["Ranks 3 failed"] if rank == 0 else []
        fails(
            lambda: named.meet_at(LocalStore(folder)),
            f"torch.distributed, rank {rank} of 4: the rendezvous failed",
            *failed_ranks,
        )
        fails(lambda: impatient.all_gather(b""), f"torch.distributed, rank {rank} of 4", "a gather failed")
        (folder / f"over-{rank}").touch()
    for others in range(3):
        wait_for(folder / f"over-{others}")
    dist.destroy_process_group()
    fails(lambda: group.exchange([(rank ^ 1, memoryview(b"1"))], []), "an exchange failed")
    assert detect() is before
    before.close()
    return [before, group]


def in_jax(folder: Path, port: str) -> list[Group]:
    import jax

    rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    assert isinstance(detect(), SingleProcessGroup)  # imported, not initialised
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    group = detect()
    assert group is detect()
    assert not jax._src.xla_bridge.backends_are_initialized(), "the detection of a group must start no backend"
    check(group)
    from ckpt.groups import jax as jax_group

    left = group._client.key_value_dir_get_bytes("ckpt/")  # type: ignore[attr-defined]
    last = {int(key.split("/")[1]) for key, _ in left}
    assert len(last) <= 2, "keys of completed gathers must be removed"

    devices = jax_group.JaxGroup()
    devices._client = None  # as in a release of jax that has its client in another place
    check(devices, 100_000)

    impatient = jax_group.JaxGroup(timeout=0.5)
    if rank == 0:
        words = "jax.distributed, rank 0 of 2", "rank 1 did not join a gather within 0.5 s"
        fails(lambda: impatient.all_gather(b""), *words)
        impatient._has_key = lambda key: False  # type: ignore[method-assign]  # as on a busy host, which answers late
        fails(lambda: impatient.all_gather(b""), *words)
        (folder / "over").touch()
    else:
        wait_for(folder / "over")
    return [group]


def in_env(folder: Path) -> list[Group]:
    group = detect()
    assert isinstance(group, EnvGroup)
    group._timeout = float(os.environ.get("TIMEOUT", "60"))
    dead_ranks._SECOND_RANK_SECONDS = float(os.environ.get("SETTLE", "2"))
    print_line("waiting")
    group.meet_at(LocalStore(folder / "repository"))
    print_line("met")
    after = os.environ.get("AFTER")
    if after == "gather":
        group.all_gather(b"")
    elif after == "stay":
        time.sleep(60)
    check(group, int(os.environ.get("LARGE", "1000")))
    assert not {"torch", "jax", "mpi4py"} & set(sys.modules), "ckpt has imported a library that the user has not imported"
    return [group]


def print_line(word: str) -> None:
    print(word, flush=True)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main(kind: str, folder: Path, *rest: str) -> None:
    groups = {"mpi": in_mpi, "torch": in_torch, "jax": in_jax, "env": in_env}[kind](folder, *rest)
    (folder / f"{groups[-1].rank}.json").write_text(json.dumps([repr(group) for group in groups]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
