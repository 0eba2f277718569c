"""Ranks that work together: what a group hands over, how ranks meet at a store, and how a group is found."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ranks_meet
from support import FailingStore, Injected, fast_folder, files, finish, one_line

from ckpt.errors import GroupError
from ckpt.groups import EnvGroup, Group, SingleProcessGroup, as_group, detect
from ckpt.groups import store_rendezvous as by_meeting
from ckpt.groups.env import rank_from_env
from ckpt.groups.hello import own_hello
from ckpt.groups.process_identity import this_process
from ckpt.groups.threads import ThreadGroup
from ckpt.storage.base.errors import InvalidArgument, NotFound
from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.urls import open_store

PROGRAM = Path(__file__).parent / "ranks_meet.py"
LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "CKPT_RUN_ID", "MASTER_", "MPI")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may themselves run in a job."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as made:
        yield made


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return or raise, each made by a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def env_groups(size: int, monkeypatch: pytest.MonkeyPatch, timeout: float = 60, run_id: str = "") -> list[EnvGroup]:
    """The ranks of a job as objects of this process; each may be used by one thread."""
    groups = []
    for rank in range(size):
        with monkeypatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(size))
            if run_id:
                patch.setenv("CKPT_RUN_ID", run_id)
            groups.append(EnvGroup(timeout))
    return groups


def meet(groups: list[EnvGroup], store: Store) -> list[Any]:
    return together(*(lambda g=g: g.meet_at(store) for g in groups))


def gather(groups: list[EnvGroup], word: str) -> list[Any]:
    return together(*(lambda g=g: g.all_gather(f"{word} {g.rank}".encode()) for g in groups))


def words(word: str, size: int) -> list[bytes]:
    return [f"{word} {rank}".encode() for rank in range(size)]


def until(condition: Callable[[], Any]) -> None:
    """Wait for something that another rank does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# --- real processes --------------------------------------------------------------------------------------------


def launch(*command: object, **env: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **{name: str(value) for name, value in env.items()}},
    )  # fmt: skip


def rank_process(folder: Path, rank: int, size: int, **env: object) -> subprocess.Popen[str]:
    """A rank that knows its number from the environment; it has said "waiting" when this returns."""
    made = launch(sys.executable, PROGRAM, "env", folder, RANK=rank, WORLD_SIZE=size, **env)
    assert made.stdout is not None
    assert made.stdout.readline() == "waiting\n"
    return made


def reports(folder: Path, size: int) -> list[list[str]]:
    """What the ranks have found."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


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


@pytest.mark.parametrize("first", [0, 1, 2])
def test_ranks_come_when_they_come(folder: Path, first: int) -> None:
    early = rank_process(folder, first, 3)
    time.sleep(0.5)
    assert early.poll() is None
    later = [rank_process(folder, rank, 3) for rank in range(3) if rank != first]
    for rank in (early, *later):
        finish(rank)


@pytest.mark.parametrize("when", ["before all have met", "in a gather"])
def test_a_meeting_of_killed_processes(folder: Path, when: str) -> None:
    """Killed with all that they had said; the next incarnation, of the same names, meets as if nothing had been."""
    meeting = folder / "repository/meet"
    if when == "in a gather":
        killed = [rank_process(folder, rank, 3, AFTER="gather" if rank < 2 else "stay") for rank in range(3)]
        until(lambda: [*meeting.glob("*/0-0")] and [*meeting.glob("*/0-1")])
    else:
        killed = [rank_process(folder, rank, 3) for rank in (0, 1)]
        until(lambda: [*meeting.glob("*/hello-1-*")])
    for process in killed:
        process.kill()
        process.communicate()
    (stale,) = meeting.iterdir()
    assert (stale / "members.json").exists() is (when == "in a gather")
    ranks = [rank_process(folder, rank, 3) for rank in (2, 1, 0)]
    for rank in ranks:
        finish(rank)
    assert not files(folder / "repository"), "neither meeting is left"


def test_a_meeting_of_the_living_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that reads the same repository meets there too."""
    other = rank_process(folder, 0, 2, CKPT_RUN_ID="other", TIMEOUT=60)
    until(lambda: [*(folder / "repository").glob("meet/*/open")])
    groups = env_groups(2, monkeypatch)
    assert meet(groups, LocalStore(folder / "repository")) == [None, None]
    second = rank_process(folder, 1, 2, CKPT_RUN_ID="other", TIMEOUT=60)
    finish(other)
    finish(second)
    assert gather(groups, "here") == [words("here", 2)] * 2


LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def elsewhere(folder: Path, rank: int, size: int) -> tuple[subprocess.Popen[str], int]:
    """A rank that another process has started, which is returned with the number of that of the rank."""
    launcher = launch(sys.executable, "-c", LAUNCHER, sys.executable, PROGRAM, "env", folder, RANK=rank, WORLD_SIZE=size)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "waiting\n"
    (child,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return launcher, int(child)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("launcher_lives", [False, True])
def test_a_rank_of_another_start_is_not_taken(folder: Path, launcher_lives: bool) -> None:
    """Of the job as it was before it was started again, or of another one at the same time: nothing names either."""
    launcher, other = elsewhere(folder, 1, 2)
    try:
        if not launcher_lives:
            launcher.kill()
            launcher.wait()
        zero = rank_process(folder, 0, 2, SETTLE=60)
        until(lambda: [*(folder / "repository").glob("meet/*/hello-1-*")])
        time.sleep(0.5)
        assert zero.poll() is None
        one = rank_process(folder, 1, 2)
        finish(zero)
        finish(one)
        assert Path(f"/proc/{other}").exists(), "it waits for its own rank 0"
    finally:
        os.kill(other, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize("shell", ["stays", "ends"])
@pytest.mark.parametrize(("settle", "timeout"), [(0.2, 60), (60, 3)])
def test_ranks_that_different_processes_have_started(folder: Path, shell: str, settle: float, timeout: float) -> None:
    """Each in a shell of its own, which may end: they meet, once it is plain, or too late, that nobody else says to be one."""
    launcher, other = elsewhere(folder, 1, 2)
    try:
        if shell == "ends":
            launcher.kill()
            launcher.wait()
        finish(rank_process(folder, 0, 2, SETTLE=settle, TIMEOUT=timeout))
        if shell == "stays":
            finish(launcher)
        else:
            until(lambda: (folder / "1.json").exists())
        until(lambda: len([*folder.glob("?.json")]) == 2)
    finally:
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()


# --- one process, many threads ---------------------------------------------------------------------------------


def test_alone() -> None:
    ranks_meet.check(SingleProcessGroup(), 1000)


def test_threads() -> None:
    assert together(*(lambda g=g: ranks_meet.check(g, 100_000) for g in ThreadGroup.make(4))) == [None] * 4


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


# --- meeting at a store ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["memory://meet/{id}", "{folder}"])
def test_any_store_is_a_meeting_place(folder: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    store = open_store(url.format(folder=folder, id=os.getpid()))
    groups = env_groups(4, monkeypatch)

    def run(group: Group) -> None:
        group.meet_at(store)
        ranks_meet.check(group, 100_000)
        group.close()

    assert together(*(lambda g=g: run(g) for g in groups)) == [None] * 4
    assert not [*store.list()]


def test_what_was_gathered_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = env_groups(3, monkeypatch)
    meet(groups, LocalStore(folder))
    for number in range(5):
        assert gather(groups, f"gather {number}") == [words(f"gather {number}", 3)] * 3
        (meeting,) = (folder / "meet").iterdir()
        assert [p.name for p in meeting.glob("[0-9]*-*")] == [f"{number}-all"]


def test_several_stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One meeting for each, whatever was gathered at the others."""
    stores = [LocalStore(folder / name) for name in "ab"]
    groups = env_groups(2, monkeypatch)
    for number, store in enumerate((stores[0], stores[1], stores[0], LocalStore(folder / "b"))):
        assert meet(groups, store) == [None, None]
        assert gather(groups, f"gather {number}") == [words(f"gather {number}", 2)] * 2
    assert [len([*(folder / name / "meet").iterdir()]) for name in "ab"] == [1, 1]
    together(*(g.close for g in groups))
    assert not files(folder)


def test_two_meetings_of_one_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one place, one after the other, and used by turns."""
    store = LocalStore(folder)
    first, second = (env_groups(3, monkeypatch, run_id="job") for _ in range(2))
    for groups in (first, second):
        assert meet(groups, store) == [None] * 3
    for number in range(3):
        for word, groups in (("first", first), ("second", second)):
            assert gather(groups, f"{word} {number}") == [words(f"{word} {number}", 3)] * 3


def test_two_jobs_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one place, and each with ranks of the same numbers."""
    jobs = {name: env_groups(3, monkeypatch, run_id=name) for name in ("one", "two")}
    store = LocalStore(folder)

    def run(name: str, group: EnvGroup) -> list[list[bytes]]:
        group.meet_at(store)
        return [group.all_gather(f"{name} {number} {group.rank}".encode()) for number in range(5)]

    # Rank by rank, so that ranks of both jobs wait for each other at every moment.
    pairs = [(name, jobs[name][rank]) for rank in (2, 1, 0) for name in jobs]
    for (name, _), got in zip(pairs, together(*(lambda p=p: run(*p) for p in pairs)), strict=True):
        assert got == [words(f"{name} {number}", 3) for number in range(5)]


def test_ranks_that_do_not_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(folder)
    groups = env_groups(4, monkeypatch, timeout=0.5)
    groups[2]._timeout = 2  # it waits longer than rank 0, which else may find it gone too
    told = meet([groups[0], groups[2]], store)
    for rank, error in zip((0, 2), told, strict=True):
        assert isinstance(error, GroupError)
        one_line(
            error, f"environment (RANK, WORLD_SIZE), rank {rank} of 4", f"the rendezvous at {store.url}",
            "every rank must make the same call", "group=None",
        )  # fmt: skip
    one_line(told[0], "ranks 1, 3 did not join the rendezvous at ", " within 0.5 s")
    assert not [*folder.glob("meet/*/open")], "rank 0 has closed it"


def test_rank_0_does_not_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = env_groups(3, monkeypatch, timeout=0.2)
    for error in meet(groups[1:], LocalStore(folder / "new")):
        assert isinstance(error, GroupError)
        one_line(error, "rank 0 did not join")
    assert not (folder / "new").exists(), "to wait leaves nothing"
    # One that opened a meeting once, and answers no more.
    (_, group) = env_groups(2, monkeypatch, timeout=0.2)
    LocalStore(folder).put(f"meet/{group._job_id.digest}-2-{'0' * 16}/open", b"")
    with pytest.raises(GroupError, match="rank 0 did not join"):
        group.meet_at(LocalStore(folder))


def test_a_rank_gives_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says who is missing while rank 0 still waits, and nobody counts on it until it comes again."""
    groups = env_groups(4, monkeypatch)
    rest = [threading.Thread(target=lambda g=g: meet([g], LocalStore(folder))) for g in groups]
    for rank in (0, 1):
        rest[rank].start()
    until(lambda: [*folder.glob("meet/*/hello-1-*")])
    groups[2]._timeout = 0.2
    with pytest.raises(GroupError, match="rank 3 did not join the rendezvous at .* within 0.2 s"):
        groups[2].meet_at(LocalStore(folder))
    groups[2]._timeout = 60
    rest[3].start()
    until(lambda: [*folder.glob("meet/*/hello-3-*")])
    rest[2].start()
    for thread in rest:
        thread.join()
    assert gather(groups, "all") == [words("all", 4)] * 4


def test_a_rank_that_does_not_gather(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = env_groups(3, monkeypatch, timeout=0.5)
    meet(groups, LocalStore(folder))
    gather(groups, "all")
    for error in gather(groups[:2], "two"):
        assert isinstance(error, GroupError)
        one_line(error, "rank 2 did not join a gather", " within 0.5 s")
    with pytest.raises(GroupError, match="meet_at"):
        groups[0].all_gather(b"the next one would be taken for the one that failed")
    for group in groups:
        group._timeout = 60
    groups[2].close()
    assert meet(groups, LocalStore(folder)) == [None] * 3
    assert gather(groups, "again") == [words("again", 3)] * 3


@pytest.mark.parametrize("members", ["never", "before", "after"])
def test_a_meeting_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch, members: str) -> None:
    """Of the same job, and of another incarnation, whose end can't be seen from here."""
    groups = env_groups(2, monkeypatch, timeout=10)
    old = folder / "meet" / f"{groups[0]._job_id.digest}-2-{'0' * 16}"
    old.mkdir(parents=True)
    owner = dataclasses.replace(this_process(), host="elsewhere")
    (old / "open").write_bytes(dataclasses.replace(own_hello(), owner=owner).encode())
    if members == "before":
        (old / "members.json").write_text('["0", "1"]')
        # none is said to it
        monkeypatch.setattr("ckpt.groups.store_rendezvous.StoreRendezvous._withdraw_hellos", lambda *a: None)
    early = threading.Thread(target=lambda: groups[1].meet_at(LocalStore(folder)))
    early.start()
    if members != "before":
        until(lambda: [*old.glob("hello-1-*")])
    if members == "after":
        LocalStore(folder).put(f"meet/{old.name}/members.json", b'["0", "1"]')
        time.sleep(0.5)  # in which rank 1 looks at it
    groups[0].meet_at(LocalStore(folder))
    early.join()
    assert gather(groups, "new") == [words("new", 2)] * 2
    assert not [*old.glob("hello-*")], "taken back"
    assert not [*old.glob("0-*")]


def test_a_rank_that_was_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first process has said hello, and died; rank 0 waits for the second."""
    groups = env_groups(2, monkeypatch)
    zero = threading.Thread(target=lambda: groups[0].meet_at(LocalStore(folder)))
    with monkeypatch.context() as patch:
        # In time: rank 0 looks only once the dead one has said hello.
        said = threading.Event()
        patch.setattr(
            "ckpt.groups.store_rendezvous._list_markers", lambda *a, real=by_meeting._list_markers: said.wait() and real(*a)
        )
        zero.start()
        until(lambda: [*folder.glob("meet/*/open")])
        (meeting,) = (folder / "meet").iterdir()
        dead = dataclasses.replace(this_process(), started="1")
        (meeting / "hello-1-0123456789abcdef").write_bytes(dataclasses.replace(own_hello(), owner=dead).encode())
        said.set()
        time.sleep(0.1)
        assert zero.is_alive()
        groups[1].meet_at(LocalStore(folder))
        zero.join()
    assert gather(groups, "both") == [words("both", 2)] * 2


def test_who_has_waited_long_enough_is_not_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 have come, and given up before rank 0 does: it names the one that nobody has seen."""
    groups = env_groups(4, monkeypatch, timeout=1)
    groups[0]._timeout = 4
    told = together(*(lambda g=g: g.meet_at(LocalStore(folder)) for g in groups[:3]))
    for error in told:
        assert isinstance(error, GroupError)
        one_line(error, ": rank 3 did not join")


def test_two_processes_of_one_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both alive: rank 0 can't tell which is the right one, and says so."""
    groups = env_groups(3, monkeypatch)
    ones = [env_groups(3, monkeypatch, timeout=2)[1] for _ in range(2)]
    store = LocalStore(folder)

    def rank_2() -> None:
        until(lambda: len([*folder.glob("meet/*/hello-1-*")]) == 2)
        groups[2]._timeout = 2
        groups[2].meet_at(store)

    calls = [lambda: groups[0].meet_at(store), rank_2, *(lambda g=g: g.meet_at(store) for g in ones)]
    told = together(*calls)
    assert [type(error) for error in told] == [GroupError] * 4
    here = f"process {os.getpid()} on {socket.gethostname()}"
    one_line(told[0], f"{here} and {here} both claim to be rank 1", "CKPT_RUN_ID")
    assert not files(folder)


@pytest.mark.parametrize(
    ("change", "named", "left"),
    [
        ({}, False, True),  # alive: the same process
        ({"started": "1"}, False, False),  # dead
        ({"host": "elsewhere"}, False, True),
        ({"host": "elsewhere"}, True, False),  # the job has its name back
        ({"host": "elsewhere", "since": "2020-02-02T02:02:02Z"}, False, False),
    ],
)
def test_which_meetings_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], named: bool, left: bool
) -> None:
    store = LocalStore(folder)
    run_id = "job" if named else ""
    meet(env_groups(2, monkeypatch, run_id=run_id), store)
    (old,) = folder.glob("meet/*")
    owner = dataclasses.replace(this_process(), **change)
    (old / "open").write_bytes(dataclasses.replace(own_hello(), owner=owner).encode())
    meet(env_groups(2, monkeypatch, run_id=run_id), store)
    assert old.exists() is left
    assert len([*folder.glob("meet/*")]) == 1 + left


def test_the_end_does_not_wait_for_the_dead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves what the others may still need."""
    monkeypatch.setattr("ckpt.groups.store_rendezvous._LEAVE_SECONDS", 0.1)
    groups = env_groups(3, monkeypatch)
    meet(groups, LocalStore(folder))
    groups[1].close()
    groups[0].close()
    assert {p.name for p in folder.glob("meet/*/*")} >= {"members.json", "bye-1"}
    together(groups[0].close, groups[2].close)  # closed twice


def test_who_leaves_late_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start of the job has removed the meeting; also what a rank put there just afterwards."""
    groups, store = env_groups(3, monkeypatch, run_id="job"), LocalStore(folder)
    meet(groups, store)
    (old,) = folder.glob("meet/*")
    owner = dataclasses.replace(this_process(), started="1")  # dead
    (old / "open").write_bytes(dataclasses.replace(own_hello(), owner=owner).encode())
    again = [env_groups(3, monkeypatch, run_id="job") for _ in range(2)]
    meet(again[0], store)
    groups[1].close()
    assert not old.exists()
    store.put(f"meet/{old.name}/bye-2", b"")
    meet(again[1], store)
    assert not old.exists()


def test_a_forked_child_ends_no_meeting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = env_groups(1, monkeypatch)
    meet(groups, LocalStore(folder))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        groups[0].close()
    assert [*folder.glob("meet/*/members.json")]


def test_a_store_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("put", "list_folders", "get"):
        groups = env_groups(1, monkeypatch)
        with pytest.raises(GroupError) as told:
            groups[0].meet_at(FailingStore(LocalStore(folder), call, 1))
        assert isinstance(told.value.__cause__, Injected)
        one_line(told, "rank 0 of 1", f"meeting at {LocalStore(folder).url} failed", "injected")
        LocalStore(folder).put("meet/litter/hello-1-0", b"")  # for the next to read


def test_a_rank_that_could_not_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 could not open its meeting there, and tells nobody; this rank does not wait for it in vain."""
    group = env_groups(2, monkeypatch)[1]
    with pytest.raises(GroupError) as told:
        group.meet_at(FailingStore(LocalStore(folder), "put", 1))
    one_line(told, "rank 1 of 2", f"meeting at {LocalStore(folder).url} failed", "injected")
    assert not files(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_died_is_not_gathered_from(folder: Path, dead: int) -> None:
    """It has met the other, and comes to no gather: that is seen, where both are on one host."""
    ranks = [rank_process(folder, rank, 2, TIMEOUT=600, **({"AFTER": "stay"} if rank == dead else {})) for rank in (0, 1)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "met\n"
    ranks[dead].kill()
    ranks[dead].communicate()
    _, said = ranks[1 - dead].communicate(timeout=60)
    assert ranks[1 - dead].returncode == 1
    assert f"rank {dead} (process {ranks[dead].pid} on {socket.gethostname()}) is dead" in said


def test_temporary_files_that_are_swept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 prepares the repository while the others are putting: their puts are repeated."""
    groups = env_groups(3, monkeypatch)
    over = threading.Event()

    def sweep() -> None:
        while not over.is_set():
            with suppress(NotFound):  # published since it was listed
                LocalStore(folder).sweep_temporaries("")

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    try:
        assert meet(groups, LocalStore(folder)) == [None] * 3
        for number in range(20):
            assert gather(groups, f"{number}") == [words(f"{number}", 3)] * 3
    finally:
        over.set()
        sweeping.join()


def test_a_gather_needs_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = env_groups(1, monkeypatch)
    with pytest.raises(GroupError, match="meet_at"):
        group.all_gather(b"")


# --- what the environment says ---------------------------------------------------------------------------------

SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "run"}


@pytest.mark.parametrize(
    ("environ", "found"),
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
def test_the_environment(environ: dict[str, str], found: Any) -> None:
    here = rank_from_env(environ)
    assert (here and (here.rank, here.size, here.name, here.job_id.is_named)) == found


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("one", "4"), ("0", ""), ("0", "0")])
def test_an_environment_that_makes_no_sense(rank: str, size: str) -> None:
    with pytest.raises(GroupError) as told:
        rank_from_env({"RANK": rank, "WORLD_SIZE": size})
    one_line(told, f"RANK={rank} and WORLD_SIZE={size}", "group=None")


def test_the_name_of_a_job() -> None:
    """The same for all its ranks, on any node, and another for each other job and restart."""

    def job(environ: dict[str, str], **more: str) -> str:
        here = rank_from_env(environ | more)
        assert here is not None
        return here.job_id.digest

    slurm = job(SLURM)
    assert job(SLURM, SLURM_PROCID="4", SLURM_NODEID="1") == slurm
    others = [job(SLURM, **{name: "9"}) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    assert len({slurm, *others}) == 4
    # Each agent of torchrun counts its own restarts, so nodes of one job differ.
    assert job(TORCHRUN, TORCHELASTIC_RESTART_COUNT="1", RANK="0") == job(TORCHRUN, TORCHELASTIC_RESTART_COUNT="0")
    assert job(TORCHRUN, TORCHELASTIC_RUN_ID="other") != job(TORCHRUN)
    assert job(TORCHRUN, CKPT_RUN_ID="mine") == job(SLURM, CKPT_RUN_ID="mine") != job(TORCHRUN)


# --- which group -----------------------------------------------------------------------------------------------


def test_no_job() -> None:
    assert isinstance(detect(), SingleProcessGroup)
    assert isinstance(as_group(), SingleProcessGroup)


def test_a_job_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(detect(), SingleProcessGroup)


def test_a_job_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.groups._env_groups", {})
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


def test_torch_of_one_process_knows_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    from ckpt.groups.torch import TorchGroup

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert isinstance(detect(), SingleProcessGroup)
        ranks_meet.check(as_group(dist.group.WORLD), 1000)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        assert TorchGroup().can_exchange
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
        on_device = TorchGroup()
        assert str(on_device._device) == "cuda:3"
        assert not on_device.can_exchange
    finally:
        dist.destroy_process_group()


def test_a_group_is_a_group() -> None:
    group = ThreadGroup.make(2)[1]
    assert as_group(group) is group


@pytest.mark.parametrize("wrong", ["mpi", 3, [0, 1], object()])
def test_what_is_no_group(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="'auto', None"):
        as_group(wrong)


def test_no_environment_group_without_an_environment() -> None:
    with pytest.raises(GroupError, match="set RANK and WORLD_SIZE"):
        EnvGroup()
