"""Ranks meet at a store: late, missing, killed, from other starts, two jobs at once."""

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
from helpers.meetings import env_groups, gather, meet, rank_process, together, words
from helpers.meetings import folder as folder
from helpers.messages import one_line
from helpers.processes import until
from helpers.repositories import files
from programs import meeting_rank

from ckpt.errors import GroupError
from ckpt.groups import EnvGroup, Group
from ckpt.groups import store_rendezvous as by_meeting
from ckpt.groups.hello import own_hello
from ckpt.groups.process_identity import this_process
from ckpt.storage.base.errors import NotFound
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.urls import open_store


@pytest.mark.parametrize("url", ["memory://meet/{id}", "{folder}"])
def test_any_store_is_a_meeting_place(folder: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    store = open_store(url.format(folder=folder, id=os.getpid()))
    groups = env_groups(4, monkeypatch)

    def run(group: Group) -> None:
        group.meet_at(store)
        meeting_rank.check(group, 100_000)
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
            "ckpt.groups.store_rendezvous.list_markers", lambda *a, real=by_meeting.list_markers: said.wait() and real(*a)
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
