"""Two writers on one repository: the second is refused, or the first is fenced; their files are never mixed."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.failing_store import failing
from helpers.messages import one_line
from helpers.processes import SOAK, finish, python, stop
from helpers.repositories import assert_all_load, assert_clean
from helpers.states import assert_same, state_of
from helpers.two_writers import HOLDER_PROGRAM, is_zombie, take_over

import ckpt
from ckpt.format import json_records
from ckpt.groups.process_identity import is_alive, is_dead, this_process
from ckpt.loading import newest_step_load
from ckpt.repository.group_lease import GroupLease
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease, acquire_lease
from ckpt.storage.base.errors import StoreError
from ckpt.storage.local.directory import LocalStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="detects live processes by /proc")


def test_the_second_writer_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    first = python(HOLDER_PROGRAM, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "holding\n"
    for call in (
        lambda: ckpt.save(state_of(9), tmp_path, 9),
        lambda: ckpt.save(state_of(9), tmp_path, 9, blocking=False),
        lambda: ckpt.Checkpointer(tmp_path),
    ):
        with pytest.raises(ckpt.RepositoryBusy) as error:
            call()
        one_line(error, f"process {first.pid}", socket.gethostname(), "wait for it, stop it, or save to another URL")
    assert_same(ckpt.load(tmp_path), state_of(0))  # reading needs no lease
    finish(first)
    ckpt.save(state_of(2), tmp_path, 2)
    assert assert_all_load(tmp_path) == [0, 1, 2]
    assert_clean(tmp_path)


def test_a_killed_writer_is_taken_over_at_once(tmp_path: Path) -> None:
    first = python(HOLDER_PROGRAM, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "holding\n"
    stop(first.pid)  # a stopped process is not dead
    with pytest.raises(ckpt.RepositoryBusy):
        ckpt.save(state_of(1), tmp_path, 1)
    first.kill()
    while not is_zombie(first.pid):  # a zombie that was not reaped has no lease
        time.sleep(0.001)
    ckpt.save(state_of(1), tmp_path, 1)
    first.communicate()
    assert assert_all_load(tmp_path) == [0, 1]


def test_a_forked_child_is_refused_as_another_writer(tmp_path: Path) -> None:
    code = """
import os, sys, ckpt
from helpers.states import state_of
saver = ckpt.Checkpointer(sys.argv[1])
saver.save(0, state_of(0), blocking=True)
pid = os.fork()
if not pid:
    try:
        ckpt.save(state_of(1), sys.argv[1], 1)
    except ckpt.RepositoryBusy as error:
        print("busy", str(os.getppid()) in str(error), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
saver.save(2, state_of(2), blocking=True)
saver.close()
"""
    assert finish(python(code, tmp_path)) == "busy True\n"
    assert assert_all_load(tmp_path) == [0, 2]


def test_is_alive_compares_host_boot_namespace_and_start() -> None:
    me = this_process()
    assert is_alive(me, me) is True
    for change, lives in (
        ({"started": "1"}, False),  # another process has the number now
        ({"pid": 1 << 30}, False),
        ({"boot": "another"}, None),  # the same host after a reboot, or another host of this name
        ({"host": "another"}, None),
        ({"host": "another", "boot": "another"}, None),
        ({"namespace": "another"}, None),  # a container beside this one
    ):
        assert is_alive(dataclasses.replace(me, **change), me) is lives, change


def test_rank_0_on_another_host_of_the_same_name_is_not_taken_for_dead(tmp_path: Path) -> None:
    """Several hosts may be called "localhost", and clones of an image have the same name."""
    repo = Repository(LocalStore(tmp_path))
    (tmp_path / "generations").mkdir()
    owner = dataclasses.replace(this_process(), boot="another", pid=1 << 30)
    data = json_records.encode("generation", {"owner": dataclasses.asdict(owner)})
    (tmp_path / "generations/00000003.json").write_bytes(data)
    assert GroupLease(WriterLease(repo, 3), rank=1, size=2).rank_0_error() is None
    dead_owner = dataclasses.replace(owner, boot=this_process().boot)
    (tmp_path / "generations/00000003.json").write_bytes(
        json_records.encode("generation", {"owner": dataclasses.asdict(dead_owner)})
    )
    assert "is dead" in str(GroupLease(WriterLease(repo, 3), rank=1, size=2).rank_0_error())


def test_a_process_without_free_descriptors_takes_no_process_for_dead() -> None:
    """It can't read /proc, so it takes no live process for dead."""
    me = this_process()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StoreError, match="Too many open files; this process has too many files open: raise the limit"):
            is_alive(me, me)
        dead = is_dead(me, me)
        own_identity = this_process()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not dead
    assert own_identity.pid == me.pid, "its own identity must not fail, as that would end a collective call"
    assert is_alive(me, me) is True


@pytest.mark.parametrize("blocking", [True, False])
def test_a_fenced_writer_commits_nothing(tmp_path: Path, blocking: bool) -> None:
    saver = ckpt.Checkpointer(tmp_path, keep=1)
    saver.save(0, state_of(0), blocking=True)
    take_over(tmp_path, 7)
    with pytest.raises((ckpt.Fenced, ckpt.SaveFailed)) as error:
        saver.save(1, state_of(1), blocking=blocking)
        saver.wait()
    one_line(error, "taken over", "process 4711 on elsewhere", "stop it")
    with pytest.raises(ckpt.CkptError):
        saver.save(2, state_of(2), blocking=True)
    saver.close()
    assert assert_all_load(tmp_path) == [0]


def test_a_fenced_writer_deletes_nothing(tmp_path: Path) -> None:
    """It is taken over between its commit and its deletion: the step to delete may be in use already. It can't prove its lease
    any more and raises an error; its committed step stays."""
    ckpt.save(state_of(0), tmp_path, 0)
    with failing("save.published=sleep:1"):
        handle = ckpt.save(state_of(1), tmp_path, 1, keep=1, blocking=False)
        while not (tmp_path / "steps/1/commit.json").exists():
            time.sleep(0.001)
        take_over(tmp_path, 7)
        with pytest.raises(ckpt.Fenced):
            handle.result()
    assert assert_all_load(tmp_path) == [0, 1]


def test_a_takeover_from_another_host_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ckpt.save(state_of(0), tmp_path, 0)
    take_over(tmp_path, 7)
    ckpt.save(state_of(1), tmp_path, 1)
    assert "process 4711 on elsewhere" in caplog.text
    assert assert_all_load(tmp_path) == [0, 1]
    assert [p.name for p in tmp_path.glob("generations/*")] == ["00000008.json"]


RACE = """
import os, sys, time, ckpt
from helpers.states import state_of
import ckpt.saving.pipeline, pyarrow.parquet
me = int(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    url, begin = line.split()
    state = state_of(0) | {"who": me}
    while time.time() < float(begin):
        pass
    try:
        ckpt.save(state, url, 0)
        outcome = "saved"
    except (ckpt.RepositoryBusy, ckpt.AlreadyExists) as error:
        outcome = type(error).__name__
    except BaseException as error:
        outcome = repr(error)
    print(outcome.replace("\\n", " "), flush=True)
"""


@pytest.mark.soak
def test_of_two_writers_that_start_together_one_saves(tmp_path: Path) -> None:
    """The repository does not exist yet. One writer may also be done before the other reads the lease."""
    racers = [python(RACE, n) for n in range(2)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for i in range(200 if SOAK else 40):
        root = tmp_path / str(i)
        begin = time.time() + 0.01
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(f"{root} {begin}\n")
            racer.stdin.flush()
        outcomes = [racer.stdout.readline().rstrip("\n") for racer in racers if racer.stdout]
        assert outcomes.count("saved") == 1, outcomes
        assert set(outcomes) <= {"saved", "RepositoryBusy", "AlreadyExists"}, outcomes
        assert_same(ckpt.load(root), state_of(0) | {"who": outcomes.index("saved")})
        ckpt.save(state_of(1), root, 1)
        assert_clean(root)
    for racer in racers:
        finish(racer)


OTHER = """
import sys, ckpt, numpy as np
with ckpt.Checkpointer(sys.argv[1]) as saver:
    saver.save(5, {"x": np.full(1 << 20, 9.0)}, blocking=True)
    print("saved", flush=True)
    input()
    saver.save(6, {"x": np.full(1 << 20, 10.0)}, blocking=True)
"""


def test_a_repository_that_another_process_recreated_is_not_touched(tmp_path: Path) -> None:
    """The repository was removed and created again at the same URL, with the same generation number: none of its files is
    touched."""
    saver = ckpt.Checkpointer(tmp_path / "r")
    saver.save(1, {"x": np.full(1 << 20, 1.0)}, blocking=True)
    shutil.rmtree(tmp_path / "r")
    other = python(OTHER, tmp_path / "r")
    assert other.stdout is not None
    assert other.stdout.readline() == "saved\n"
    with pytest.raises(ckpt.StoreError, match="was deleted or emptied during a save"):
        saver.save(5, {"x": np.full(1 << 20, 2.0)}, blocking=True)
    saver.close()
    assert json.loads(next((tmp_path / "r/generations").iterdir()).read_text())["owner"]["pid"] == other.pid
    other.communicate("\n", timeout=600)
    assert other.returncode == 0
    assert ckpt.open(tmp_path / "r").steps() == [5, 6]
    assert ckpt.load(tmp_path / "r", step=5)["x"][0] == 9


def test_packs_of_a_recreated_repository_are_not_taken_for_own_ones(tmp_path: Path) -> None:
    """Its packs have the names of earlier packs but other bytes: none is taken for a pack that this process wrote."""
    state = {"x": np.random.default_rng(0).integers(0, 9, 1 << 20, "u1")}
    ckpt.save(state, tmp_path / "r", step=0, codec="none")
    shutil.rmtree(tmp_path / "r")
    code = """
import sys, ckpt, numpy as np
state = {"x": np.random.default_rng(0).integers(0, 9, 1 << 20, "u1")}
ckpt.save(state, sys.argv[1], step=0, codec={"id": "zstd"})
"""
    finish(python(code, tmp_path / "r"))
    saved = ckpt.save(state, tmp_path / "r", step=1, codec="none")
    assert saved.commit.written_bytes == 0, "the block was written again"
    assert saved.verify()
    assert_same(ckpt.load(tmp_path / "r", step=1, strict=True), state)


def test_threads_of_one_process_save_without_refusing_each_other(tmp_path: Path) -> None:
    """Two saves of the same step compete, and one of them raises AlreadyExists."""
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def run(number: int) -> None:
        barrier.wait()
        for step in range(10 * (number // 2), 10 * (number // 2) + 10):
            try:
                ckpt.save(state_of(step), tmp_path, step)
                outcomes.append(f"saved {step}")
            except ckpt.AlreadyExists:
                pass

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == sorted(f"saved {step}" for step in range(20))
    assert assert_all_load(tmp_path) == list(range(20))
    ckpt.save(state_of(20), tmp_path, 20)
    assert_clean(tmp_path)


def test_savers_of_one_process_share_the_writer_lease(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as one, ckpt.Checkpointer(tmp_path) as two:
        one.save(0, state_of(0))
        two.save(1, state_of(1), blocking=True)
        ckpt.save(state_of(2), tmp_path, 2)
        handle = ckpt.save(state_of(3), tmp_path, 3, blocking=False)
        ckpt.save(state_of(4), tmp_path, 4)
        handle.result()
        one.wait()
    assert assert_all_load(tmp_path) == [0, 1, 2, 3, 4]
    assert_clean(tmp_path)


def test_the_lease_is_free_when_a_result_is_returned(tmp_path: Path) -> None:
    """A caller that has the result can start the next writer."""
    code = "import sys, ckpt; from helpers.states import state_of; ckpt.save(state_of(1), sys.argv[1], 1)"
    ckpt.save(state_of(0), tmp_path, 0, blocking=False).result()
    (record,) = tmp_path.glob("generations/*.json")
    assert json_records.decode("generation", record.read_bytes(), "")["owner"] is None
    finish(python(code, tmp_path))
    assert assert_all_load(tmp_path) == [0, 1]


def test_a_sweep_does_not_delete_the_file_that_releases_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy between tiers may start to sweep temporary files while the lease is being released."""
    repo = Repository(LocalStore(tmp_path))
    lease = acquire_lease(repo)
    began, done = threading.Event(), threading.Event()
    put = repo.store.put

    def put_slowly(name: str, data: bytes) -> None:
        threading.Thread(target=lambda: (began.set(), lease.sweep_temporaries_once(), done.set())).start()
        began.wait(600)
        assert not done.wait(0.2)
        put(name, data)

    with monkeypatch.context() as patch:
        patch.setattr(repo.store, "put", put_slowly)
        patch.setattr(repo.store, "sweep_temporaries", lambda _: pytest.fail("temporary files were swept"))
        lease.release()
        assert done.wait(600)
    acquire_lease(repo).release()


def test_a_load_takes_a_newer_step_where_a_writer_deletes_its_step(tmp_path: Path) -> None:
    """With keep=1 the step being read may be deleted; the load then takes the newer one, and warns of no damage."""
    code = """
import sys, ckpt
from helpers.states import state_of
ckpt.save(state_of(0), sys.argv[1], 0)
print("ready", flush=True)
with ckpt.Checkpointer(sys.argv[1], keep=1) as saver:
    for step in range(1, 300):
        saver.save(step, state_of(step), blocking=True)
"""
    writer = python(code, tmp_path)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    seen = [0]
    while writer.poll() is None:
        state = ckpt.load(tmp_path, strict=True)
        assert_same(state, state_of(state["step"]))
        assert state["step"] >= seen[-1]
        seen.append(state["step"])
    finish(writer)
    assert len(set(seen)) > 2
    assert_same(ckpt.load(tmp_path), state_of(299))


def test_a_load_finds_a_step_where_a_writer_deletes_each_step_that_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer commits the next step, and deletes the one before, between a listing and each look at what was listed."""
    ckpt.save(state_of(0), tmp_path, 0)
    saved = [0]

    def after_the_next_save(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if len(saved) < 5:
                saved.append(saved[-1] + 1)
                ckpt.save(state_of(saved[-1]), tmp_path, saved[-1], keep=1)
            return original(*arguments)

        return call

    for name in ("open_agreed_checkpoint", "_has_committed"):
        monkeypatch.setattr(newest_step_load, name, after_the_next_save(getattr(newest_step_load, name)))
    assert_same(ckpt.load(tmp_path, strict=True), state_of(4))
    assert saved == [0, 1, 2, 3, 4]


def test_a_reused_process_number_does_not_keep_the_lease(tmp_path: Path) -> None:
    """The number of the lost owner belongs to another process now; the repository is not busy."""
    ckpt.save(state_of(0), tmp_path, 0)
    owner = dataclasses.replace(this_process(), pid=os.getppid(), started="1")
    data = json_records.encode("generation", {"owner": dataclasses.asdict(owner)})
    (tmp_path / "generations/00000005.json").write_bytes(data)
    ckpt.save(state_of(1), tmp_path, 1)
    assert assert_all_load(tmp_path) == [0, 1]
