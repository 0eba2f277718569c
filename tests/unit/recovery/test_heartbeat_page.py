"""The heartbeat page of a rank, and the file of a run log."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.processes import finish, python

from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base.errors import CkptError
from ckpt.training.heartbeat_page import PAGE_VARIABLE, HeartbeatPage


def test_a_heartbeat_page_is_read_by_another_process(tmp_path: Path) -> None:
    rank_page, agent_page = HeartbeatPage(tmp_path / "p", new=True), HeartbeatPage(tmp_path / "p")
    assert (agent_page.read().beats, agent_page.read().step, agent_page.read().phase, agent_page.read().committed) == (
        0,
        -1,
        "start",
        -1,
    )
    rank_page.beat(2, 7)
    rank_page.publish_committed(5)
    rank_page.publish_committed(3)
    rank_page.publish_loss(float("nan"))
    beat = agent_page.read()
    assert (beat.beats, beat.step, beat.phase, beat.committed) == (1, 7, "step", 5)
    assert beat.loss != beat.loss
    assert abs(time.monotonic() - beat.since) < 60


def test_a_late_commit_of_an_earlier_line_does_not_count_on_a_later_one(tmp_path: Path) -> None:
    """A save was still running when the loop went back. Its step would hide the progress of the new line."""
    page = HeartbeatPage(tmp_path / "p", new=True)
    page.publish_committed(100, 0)
    page.publish_committed(60, 1)
    page.publish_committed(110, 0)
    assert (page.read().committed, page.read().line) == (60, 1)
    page.publish_committed(70, 1)
    page.publish_restored(65, again=True)
    assert (page.read().committed, page.read().line) == (70, 1)
    page.publish_restored(80)
    assert (page.read().committed, page.read().line) == (80, 1)


def test_a_run_log_is_to_be_removed_only_if_it_is_no_database(tmp_path: Path) -> None:
    """A full disk or a read error is not a reason to delete it: it contains the decisions of the run."""
    (tmp_path / "run.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(CkptError, match="remove it, or give another --run-dir"):
        SqliteRunLog(tmp_path)
    (tmp_path / "other" / "run.sqlite").mkdir(parents=True)
    with pytest.raises(CkptError, match="free space on this disk, and check it, or give another --run-dir"):
        SqliteRunLog(tmp_path / "other")


def test_a_page_that_cannot_be_opened_now_is_looked_up_again(tmp_path: Path) -> None:
    HeartbeatPage(tmp_path / "page", new=True).close()
    code = """
import os, resource
from ckpt.training import heartbeat_page

free = os.dup(0)
os.close(free)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
found = [heartbeat_page.own_page() is not None]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
print([*found, heartbeat_page.own_page() is not None])
"""
    assert finish(python(code, env={PAGE_VARIABLE: str(tmp_path / "page")})) == "[False, True]\n"


def test_threads_that_look_up_the_page_at_once_all_find_it(tmp_path: Path) -> None:
    """Otherwise the Checkpointer that one of them opens takes part in no coordinated stop."""
    HeartbeatPage(tmp_path / "page", new=True).close()
    code = """
import threading
from ckpt.training import heartbeat_page

begun, go_on, found = threading.Event(), threading.Event(), []
read = heartbeat_page.HeartbeatPage.read

def read_slowly(page):
    begun.set()
    go_on.wait(300)
    return read(page)

heartbeat_page.HeartbeatPage.read = read_slowly
look_up = lambda: found.append(heartbeat_page.own_page() is not None)
threads = [threading.Thread(target=look_up) for _ in range(2)]
threads[0].start()
begun.wait(300)
threads[1].start()
threads[1].join(0.5)
go_on.set()
for thread in threads:
    thread.join()
print(found)
"""
    assert finish(python(code, env={PAGE_VARIABLE: str(tmp_path / "page")})) == "[True, True]\n"


def test_the_second_program_of_a_rank_takes_over_its_page(tmp_path: Path) -> None:
    """A rank may be a shell that runs one program after another. A helper process of a living program is not a second one."""
    page = HeartbeatPage(tmp_path / "page", new=True)
    code = """
import os, subprocess, sys
from ckpt.training import heartbeat_page

own = heartbeat_page.own_page()
if len(sys.argv) > 1:
    sys.exit(own is not None)
own.publish_restored(7)
own.beat(heartbeat_page.PHASES.index("end"), 9)
print(os.getpid(), subprocess.call([sys.executable, "-c", sys.orig_argv[2], "helper"]))
"""
    for beats in (1, 3):
        before = page.read()
        process = python(code, env={PAGE_VARIABLE: str(tmp_path / "page")})
        assert finish(process) == f"{process.pid} 0\n"
        after = page.read()
        assert (after.pid, after.beats, after.step, after.restored) == (process.pid, beats, 9, 7)
        assert before.beats < after.beats
