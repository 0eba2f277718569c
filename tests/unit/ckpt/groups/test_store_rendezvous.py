"""Ranks meet at a store: late, missing, killed, restarted, and two jobs at once."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.failing_store import FailingStore, Injected
from helpers.messages import one_line
from helpers.processes import until
from helpers.rendezvous import env_groups, gather, gathered, meet, rank_process, run_in_threads
from helpers.rendezvous import folder as folder
from helpers.repositories import files
from programs import rendezvous_rank

from ckpt.errors import GroupError
from ckpt.groups import EnvGroup, Group, store_rendezvous
from ckpt.groups.hello import own_hello
from ckpt.groups.process_identity import this_process
from ckpt.storage.base.errors import NotFound
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.urls import open_store


@pytest.mark.parametrize("url", ["memory://meet/{id}", "{folder}"])
def test_ranks_meet_at_any_store(folder: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    store = open_store(url.format(folder=folder, id=os.getpid()))
    groups = env_groups(4, monkeypatch)

    def run(group: Group) -> None:
        group.meet_at(store)
        rendezvous_rank.check(group, 100_000)
        group.close()

    assert run_in_threads(*(lambda g=g: run(g) for g in groups)) == [None] * 4
    assert not [*store.list()]


def test_only_the_last_gather_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = env_groups(3, monkeypatch)
    meet(groups, LocalStore(folder))
    for number in range(5):
        assert gather(groups, f"gather {number}") == [gathered(f"gather {number}", 3)] * 3
        (meeting,) = (folder / "meet").iterdir()
        assert [p.name for p in meeting.glob("[0-9]*-*")] == [f"{number}-all"]


def test_ranks_meet_once_at_each_of_several_stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous at one store does not depend on gathers at another."""
    stores = [LocalStore(folder / name) for name in "ab"]
    groups = env_groups(2, monkeypatch)
    for number, store in enumerate((stores[0], stores[1], stores[0], LocalStore(folder / "b"))):
        assert meet(groups, store) == [None, None]
        assert gather(groups, f"gather {number}") == [gathered(f"gather {number}", 2)] * 2
    assert [len([*(folder / name / "meet").iterdir()]) for name in "ab"] == [1, 1]
    run_in_threads(*(g.close for g in groups))
    assert not files(folder)


def test_two_groups_of_one_job_gather_in_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet at one store, one after the other."""
    store = LocalStore(folder)
    first, second = (env_groups(3, monkeypatch, run_id="job") for _ in range(2))
    for groups in (first, second):
        assert meet(groups, store) == [None] * 3
    for number in range(3):
        for word, groups in (("first", first), ("second", second)):
            assert gather(groups, f"{word} {number}") == [gathered(f"{word} {number}", 3)] * 3


def test_two_jobs_at_one_store_do_not_mix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both jobs have ranks of the same numbers."""
    jobs = {name: env_groups(3, monkeypatch, run_id=name) for name in ("one", "two")}
    store = LocalStore(folder)

    def run(name: str, group: EnvGroup) -> list[list[bytes]]:
        group.meet_at(store)
        return [group.all_gather(f"{name} {number} {group.rank}".encode()) for number in range(5)]

    # Rank by rank, so that ranks of both jobs wait for each other at every moment.
    pairs = [(name, jobs[name][rank]) for rank in (2, 1, 0) for name in jobs]
    for (name, _), received in zip(pairs, run_in_threads(*(lambda p=p: run(*p) for p in pairs)), strict=True):
        assert received == [gathered(f"{name} {number}", 3) for number in range(5)]


@pytest.mark.slow
def test_missing_ranks_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(folder)
    groups = env_groups(4, monkeypatch, timeout=0.5)
    groups[2]._timeout = 2  # longer than rank 0, which could otherwise miss rank 2, too
    errors = meet([groups[0], groups[2]], store)
    for rank, error in zip((0, 2), errors, strict=True):
        assert isinstance(error, GroupError)
        one_line(
            error, f"environment (RANK, WORLD_SIZE), rank {rank} of 4", f"the rendezvous at {store.url}",
            "every rank must make the same call", "group=None",
        )  # fmt: skip
    one_line(errors[0], "ranks 1, 3 did not join the rendezvous at ", " within 0.5 s")
    assert not [*folder.glob("meet/*/open")], "rank 0 has closed the rendezvous"


def test_a_missing_rank_0_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = env_groups(3, monkeypatch, timeout=0.2)
    for error in meet(groups[1:], LocalStore(folder / "new")):
        assert isinstance(error, GroupError)
        one_line(error, "rank 0 did not join")
    assert not (folder / "new").exists(), "waiting creates no files"
    # A rank 0 that opened a rendezvous and does not answer any more.
    (_, group) = env_groups(2, monkeypatch, timeout=0.2)
    LocalStore(folder).put(f"meet/{group._job_id.digest}-2-{'0' * 16}/open", b"")
    with pytest.raises(GroupError, match="rank 0 did not join"):
        group.meet_at(LocalStore(folder))


def test_a_rank_that_gives_up_may_join_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the missing rank while rank 0 still waits, and does not count as present until it joins again."""
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
    assert gather(groups, "all") == [gathered("all", 4)] * 4


def test_a_rank_that_misses_a_gather_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert gather(groups, "again") == [gathered("again", 3)] * 3


@pytest.mark.parametrize("members", ["never", "before", "after"])
def test_a_rendezvous_of_another_incarnation_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch, members: str) -> None:
    """It belongs to the same job on another host, so that its end can't be detected."""
    groups = env_groups(2, monkeypatch, timeout=10)
    old = folder / "meet" / f"{groups[0]._job_id.digest}-2-{'0' * 16}"
    old.mkdir(parents=True)
    owner = dataclasses.replace(this_process(), host="elsewhere")
    (old / "open").write_bytes(dataclasses.replace(own_hello(), owner=owner).encode())
    if members == "before":
        (old / "members.json").write_text('["0", "1"]')
        # Rank 1 does not withdraw its hello from the old rendezvous.
        monkeypatch.setattr("ckpt.groups.store_rendezvous.StoreRendezvous._withdraw_hellos", lambda *a: None)
    early = threading.Thread(target=lambda: groups[1].meet_at(LocalStore(folder)))
    early.start()
    if members != "before":
        until(lambda: [*old.glob("hello-1-*")])
    if members == "after":
        LocalStore(folder).put(f"meet/{old.name}/members.json", b'["0", "1"]')
        time.sleep(0.5)  # so that rank 1 reads it
    groups[0].meet_at(LocalStore(folder))
    early.join()
    assert gather(groups, "new") == [gathered("new", 2)] * 2
    assert not [*old.glob("hello-*")], "the hello is withdrawn"
    assert not [*old.glob("0-*")]


def test_a_restarted_rank_joins_in_place_of_its_dead_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first process has written a hello and died; rank 0 waits for the second."""
    groups = env_groups(2, monkeypatch)
    zero = threading.Thread(target=lambda: groups[0].meet_at(LocalStore(folder)))
    with monkeypatch.context() as patch:
        # Rank 0 looks for markers only after the dead process has written its hello.
        hello_written = threading.Event()
        patch.setattr(
            "ckpt.groups.store_rendezvous.list_markers",
            lambda *a, real=store_rendezvous.list_markers: hello_written.wait() and real(*a),
        )
        zero.start()
        until(lambda: [*folder.glob("meet/*/open")])
        (meeting,) = (folder / "meet").iterdir()
        dead = dataclasses.replace(this_process(), started="1")
        (meeting / "hello-1-0123456789abcdef").write_bytes(dataclasses.replace(own_hello(), owner=dead).encode())
        hello_written.set()
        time.sleep(0.1)
        assert zero.is_alive()
        groups[1].meet_at(LocalStore(folder))
        zero.join()
    assert gather(groups, "both") == [gathered("both", 2)] * 2


@pytest.mark.slow
def test_ranks_that_gave_up_do_not_count_as_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 joined, and gave up before rank 0 does: it names the rank that never joined."""
    groups = env_groups(4, monkeypatch, timeout=1)
    groups[0]._timeout = 4
    errors = run_in_threads(*(lambda g=g: g.meet_at(LocalStore(folder)) for g in groups[:3]))
    for error in errors:
        assert isinstance(error, GroupError)
        one_line(error, ": rank 3 did not join")


@pytest.mark.slow
def test_two_processes_of_one_rank_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both live: rank 0 can't decide which one is right, and raises an error with both."""
    groups = env_groups(3, monkeypatch)
    ones = [env_groups(3, monkeypatch, timeout=2)[1] for _ in range(2)]
    store = LocalStore(folder)

    def rank_2() -> None:
        until(lambda: len([*folder.glob("meet/*/hello-1-*")]) == 2)
        groups[2]._timeout = 2
        groups[2].meet_at(store)

    calls = [lambda: groups[0].meet_at(store), rank_2, *(lambda g=g: g.meet_at(store) for g in ones)]
    errors = run_in_threads(*calls)
    assert [type(error) for error in errors] == [GroupError] * 4
    process = f"process {os.getpid()} on {socket.gethostname()}"
    one_line(errors[0], f"{process} and {process} both claim to be rank 1", "CKPT_RUN_ID")
    assert not files(folder)


@pytest.mark.parametrize(
    ("change", "named", "left"),
    [
        ({}, False, True),  # this living process
        ({"started": "1"}, False, False),  # dead
        ({"host": "elsewhere"}, False, True),
        ({"host": "elsewhere"}, True, False),  # a job with this name was started again
        ({"host": "elsewhere", "since": "2020-02-02T02:02:02Z"}, False, False),
    ],
)
def test_a_new_rendezvous_removes_those_of_dead_processes(
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


def test_closing_does_not_wait_for_dead_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the files that the others may still need."""
    monkeypatch.setattr("ckpt.groups.store_rendezvous._LEAVE_SECONDS", 0.1)
    groups = env_groups(3, monkeypatch)
    meet(groups, LocalStore(folder))
    groups[1].close()
    groups[0].close()
    assert {p.name for p in folder.glob("meet/*/*")} >= {"members.json", "bye-1"}
    run_in_threads(groups[0].close, groups[2].close)  # closed twice


def test_a_rank_that_leaves_late_leaves_no_object(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start of the job has removed the rendezvous, and also removes objects that a rank writes there afterwards."""
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


def test_a_forked_child_does_not_end_the_rendezvous(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = env_groups(1, monkeypatch)
    meet(groups, LocalStore(folder))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        groups[0].close()
    assert [*folder.glob("meet/*/members.json")]


def test_an_error_of_the_store_is_raised_as_a_group_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("put", "list_folders", "get"):
        groups = env_groups(1, monkeypatch)
        with pytest.raises(GroupError) as raised:
            groups[0].meet_at(FailingStore(LocalStore(folder), call, 1))
        assert isinstance(raised.value.__cause__, Injected)
        one_line(raised, "rank 0 of 1", f"the rendezvous at {LocalStore(folder).url} failed", "injected")
        LocalStore(folder).put("meet/litter/hello-1-0", b"")  # an object that the next rendezvous reads


def test_a_rank_that_can_not_write_its_hello_does_not_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may have failed in the same way without a marker; this rank does not wait for it in vain."""
    group = env_groups(2, monkeypatch)[1]
    with pytest.raises(GroupError) as raised:
        group.meet_at(FailingStore(LocalStore(folder), "put", 1))
    one_line(raised, "rank 1 of 2", f"the rendezvous at {LocalStore(folder).url} failed", "injected")
    assert not files(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_died_ends_the_gather_of_the_others(folder: Path, dead: int) -> None:
    """It has joined the rendezvous and died before a gather: on one host this is detected."""
    ranks = [rank_process(folder, rank, 2, TIMEOUT=600, **({"AFTER": "stay"} if rank == dead else {})) for rank in (0, 1)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "met\n"
    ranks[dead].kill()
    ranks[dead].communicate()
    _, errors = ranks[1 - dead].communicate(timeout=600)
    assert ranks[1 - dead].returncode == 1
    assert f"rank {dead} (process {ranks[dead].pid} on {socket.gethostname()}) is dead" in errors


def test_puts_are_repeated_when_their_temporary_files_are_swept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 prepares the repository, and so sweeps temporary files, while the others write."""
    groups = env_groups(3, monkeypatch)
    over = threading.Event()

    def sweep() -> None:
        while not over.is_set():
            with suppress(NotFound):  # renamed since the listing
                LocalStore(folder).sweep_temporaries("")

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    try:
        assert meet(groups, LocalStore(folder)) == [None] * 3
        for number in range(20):
            assert gather(groups, f"{number}") == [gathered(f"{number}", 3)] * 3
    finally:
        over.set()
        sweeping.join()


def test_a_gather_needs_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = env_groups(1, monkeypatch)
    with pytest.raises(GroupError, match="meet_at"):
        group.all_gather(b"")
