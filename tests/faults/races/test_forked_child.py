"""A forked child of a process that saves: it has copies of all objects of its parent, and none of them writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.processes import finish, python
from helpers.repositories import assert_all_load, assert_clean

from ckpt.training.heartbeat_page import PAGE_VARIABLE, HeartbeatPage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

IN_CHILD = """
import os, sys, traceback
import ckpt
from helpers.states import state_of
from ckpt.storage.base.failpoints import set_failpoints

url = sys.argv[1]

def in_child(work):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            work()
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def refused(call, *words):
    try:
        call()
    except ckpt.CkptError as error:
        for word in (f"process {os.getppid()}", "forked", *words):
            assert word in str(error), (word, str(error))
    else:
        raise AssertionError("the call was not refused")
"""


@pytest.mark.parametrize("tiers", ["", "tiers=[ckpt.Tier(url + '/run-near', every=1, keep=2)]"])
def test_a_child_cannot_use_the_checkpointer_of_its_parent(tmp_path: Path, tiers: str) -> None:
    code = f"""{IN_CHILD}
saver = ckpt.Checkpointer(url + "/run", every=2, keep=2, {tiers})
saver.save(0, state_of(0), blocking=True)

def child():
    for call in (
        lambda: saver.save(1, state_of(1), blocking=True),
        lambda: saver.save(1, state_of(1)),
        lambda: saver.step(1, state_of(1)),
        lambda: saver.step(2, state_of(2)),
        lambda: saver.restore(state_of(0)),
        lambda: saver.wait(),
    ):
        refused(call, "/run", "make the Checkpointer in the process that saves")
    with saver:
        pass
    with ckpt.Checkpointer(url + "/other") as own:
        own.save(7, state_of(7), blocking=True)

in_child(child)
saver.save(1, state_of(1), blocking=True)
saver.close()
assert ckpt.open(url + "/run").steps()[-1] == 1
"""
    finish(python(code, tmp_path))
    assert_all_load(tmp_path / "run", 1)
    assert_all_load(tmp_path / "other", 7)
    assert_clean(tmp_path / "run")


def test_a_background_save_continues_only_in_the_parent(tmp_path: Path) -> None:
    """The child neither waits for the save nor commits it, and does not remove its files at exit."""
    code = f"""{IN_CHILD}
import time
saver = ckpt.Checkpointer(url)
saver.save(0, state_of(0), blocking=True)
set_failpoints("save.commit=sleep:2")
handle = saver.save(1, state_of(1))

def child():
    assert not handle.done()
    assert not handle.wait()
    refused(handle.result, "step 1", "ask for its result in the process that saves")
    refused(lambda: saver.save(2, state_of(2)))
    sys.exit(0)  # runs the exit handlers, unlike os._exit

in_child(child)
assert not handle.done(), "the child waited for the save"
handle.result()
saver.save(2, state_of(2), blocking=True)
saver.close()
"""
    finish(python(code, tmp_path))
    assert assert_all_load(tmp_path, 2) == [0, 1, 2]
    assert_clean(tmp_path)


def test_an_optimizer_step_in_the_child_does_not_wait(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = f"""{IN_CHILD}
import torch
torch.set_num_threads(1)  # other threads do not survive a fork
weight = torch.nn.Parameter(torch.zeros(1 << 20))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.grad = torch.ones_like(weight)
saver = ckpt.Checkpointer(url)
saver.attach(optimizer)
set_failpoints("save.stage=sleep:2")
handle = saver.save(0, {{"weight": weight}})
in_child(lambda: optimizer.step())
handle.result()
saver.close()
assert not ckpt.load(url)["weight"].any(), "the child changed what the parent saves"
"""
    finish(python(code, tmp_path))


def test_forked_data_loader_workers_do_not_disturb_a_checkpointer(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = f"""{IN_CHILD}
import torch
saver = ckpt.Checkpointer(url, every=1)

class Dataset(torch.utils.data.Dataset):
    def __init__(self):
        self.saver = saver
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return i

if __name__ == "__main__":
    step = 0
    for epoch in range(2):
        for batch in torch.utils.data.DataLoader(Dataset(), num_workers=2, multiprocessing_context="fork"):
            saver.step(step, state_of(step))
            step += 1
    saver.close()
"""
    process = python(code, tmp_path)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert assert_all_load(tmp_path, 15)[-1] == 15
    assert_clean(tmp_path)


def test_a_child_does_not_write_the_heartbeat_page_of_its_parent(tmp_path: Path) -> None:
    code = f"""{IN_CHILD}
from ckpt.training import heartbeat_page
page = heartbeat_page.HeartbeatPage(url + "/page", new=True)
os.environ[heartbeat_page.PAGE_VARIABLE] = url + "/page"
saver = ckpt.Checkpointer(url + "/run", every=1000)
data = ckpt.training.heartbeat_page.own_page()
for step in range(3):
    saver.step(step, state_of(0), loss=1.0)
before = page.read()
assert before.step == 2

def child():
    refused(lambda: saver.step(3, state_of(0), loss=float("nan")))
    data.publish_batch(99)
    with ckpt.pulse.phase("eval"):
        pass
    saver.close()

in_child(child)
assert page.read() == before and page.read().pid == os.getpid()
saver.step(3, state_of(0), loss=1.0)
assert page.read().step == 3
saver.close()
"""
    (tmp_path / "run").mkdir()
    finish(python(code, tmp_path))


def test_locks_that_other_threads_held_are_free_in_the_child(tmp_path: Path) -> None:
    """A thread takes all locks that the modules of ckpt can reach, and does not exist in the child, which saves and loads."""
    finish(python((PROGRAMS / "held_locks.py").read_text(), tmp_path))


def test_a_child_collects_garbage_that_another_thread_has_paused(tmp_path: Path) -> None:
    """A save pauses the garbage collector of its process for a moment. The save does not continue in the child."""
    code = f"""{IN_CHILD}
import gc, threading
from ckpt.support.runtime import collector_paused
are_paused, end = threading.Event(), threading.Event()

def pause():
    with collector_paused():
        are_paused.set()
        end.wait()

pausing = threading.Thread(target=pause)
pausing.start()
assert are_paused.wait(600)

def child():
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()

def forked_in_a_pause():
    with collector_paused():
        in_child(child)
    assert not gc.isenabled(), "the other thread still pauses it"

try:
    assert not gc.isenabled()
    in_child(child)
    forked_in_a_pause()
finally:
    end.set()
    pausing.join()
assert gc.isenabled()
"""
    finish(python(code, tmp_path))


def test_children_that_threads_fork_at_once_end_on_sigterm(tmp_path: Path) -> None:
    """Under ckpt-run, a fork blocks SIGTERM for a moment. Neither the children nor the threads of the rank keep it blocked."""
    page = tmp_path / "page"
    HeartbeatPage(page, new=True).close()
    code = """
import os, signal, threading
from ckpt.training import heartbeat_page

heartbeat_page.own_page().defer_sigterm()

def is_blocked():
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])

def fork():
    for _ in range(50):
        if not (pid := os.fork()):
            os._exit(is_blocked())
        found.append(bool(os.waitpid(pid, 0)[1]) or is_blocked())

found = []
threads = [threading.Thread(target=fork) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 200 and not any(found), f"SIGTERM stays blocked after {sum(found)} of {len(found)} forks"
"""
    finish(python(code, env={PAGE_VARIABLE: str(page)}))
