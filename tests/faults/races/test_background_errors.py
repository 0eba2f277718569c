"""Errors of a save in the background are raised once, and are logged at exit."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from helpers.failing_store import failing
from helpers.messages import one_line
from helpers.processes import finish, python
from helpers.repositories import assert_clean
from helpers.states import assert_same, state_of

import ckpt


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_saves_run_than_in_flight_allows(tmp_path: Path, limit: int) -> None:
    with failing("local.append=sleep:0.05@*"), ckpt.Checkpointer(tmp_path, in_flight=limit, keep=2) as saver:
        handles = []
        most = 0
        for step in range(8):
            handles.append(saver.save(step, state_of(step)))
            most = max(most, sum(not h.done() for h in handles))
            assert most <= limit
    assert most == limit
    assert ckpt.open(tmp_path).steps()[-1] == 7


def broken_save(root: Path, saver: ckpt.Checkpointer) -> None:
    """Let the save of step 7 fail in the background, and wait for its end without reading the error."""
    with failing("save.commit=error"):
        saver.save(7, state_of(7)).wait()


@pytest.mark.parametrize("call", ["step", "save", "wait", "close", "exit"])
def test_a_background_error_is_raised_by_the_next_call(tmp_path: Path, call: str) -> None:
    saver = ckpt.Checkpointer(tmp_path, every=1)
    saver.save(1, state_of(1)).result()
    broken_save(tmp_path, saver)
    with pytest.raises(ckpt.SaveFailed) as error:
        if call == "exit":
            with saver:
                pass
        elif call in ("step", "save"):
            getattr(saver, call)(8, state_of(8))
        else:
            getattr(saver, call)()
    one_line(error, "step 7", "failed", str(tmp_path))
    if call not in ("close", "exit"):
        saver.save(8, state_of(8))
        saver.close()
        assert ckpt.open(tmp_path).steps() == [1, 8]
        assert_clean(tmp_path, folders=False)


def test_every_background_error_is_raised_once(tmp_path: Path) -> None:
    saver = ckpt.Checkpointer(tmp_path, in_flight=2)
    with failing("save.commit=error@*"):
        for step in (7, 8):
            saver.save(step, state_of(step))
        saver._require_open().wait()
    errors = []
    for _ in range(2):
        with pytest.raises(ckpt.SaveFailed) as error:
            saver.wait()
        errors.append(str(error.value))
    assert "step 7" in errors[0]
    assert "step 8" in errors[1]
    saver.close()


def test_an_error_that_result_raised_is_not_raised_again(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as saver, failing("save.commit=error"):
        with pytest.raises(ckpt.StoreError):
            saver.save(0, state_of(0)).result()
        saver.save(1, state_of(1))
    assert ckpt.open(tmp_path).steps() == [1]


def test_the_error_of_a_dropped_handle_is_raised_by_the_next_save(tmp_path: Path) -> None:
    """Without a Checkpointer, the next ckpt.save to that URL raises it."""
    ckpt.save(state_of(0), tmp_path, 0)
    with failing("save.commit=error"):
        ckpt.save(state_of(1), tmp_path, 1, blocking=False).wait()
    with pytest.raises(ckpt.SaveFailed) as error:
        ckpt.save(state_of(2), tmp_path, 2)
    one_line(error, "step 1")
    ckpt.save(state_of(2), tmp_path, 2)
    assert ckpt.open(tmp_path).steps() == [0, 2]
    assert_clean(tmp_path, folders=False)


def test_a_background_error_does_not_hide_an_exception_of_the_with_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError, match="mine"), caplog.at_level(logging.ERROR), ckpt.Checkpointer(tmp_path) as saver:
        broken_save(tmp_path, saver)
        raise KeyError("mine")
    assert "step 7" in caplog.text


def test_a_background_error_is_logged_at_exit(tmp_path: Path) -> None:
    code = """
import logging, sys, ckpt
from helpers.states import state_of
from ckpt.storage.base.failpoints import set_failpoints
logging.basicConfig(stream=sys.stdout)
ckpt.save(state_of(0), sys.argv[1], 0)
set_failpoints("save.commit=error")
ckpt.save(state_of(1), sys.argv[1], 1, blocking=False)
"""
    process = python(code, tmp_path)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 120
    assert "ERROR:ckpt:saving step 1" in out
    assert ckpt.open(tmp_path).steps() == [0]


def test_a_process_that_ends_finishes_its_background_save(tmp_path: Path) -> None:
    """The program does not wait for the save itself."""
    code = """
import sys, ckpt
from helpers.states import state_of
from ckpt.storage.base.failpoints import set_failpoints
set_failpoints("local.append=sleep:0.3@*")
ckpt.save(state_of(3), sys.argv[1], 3, blocking=False)
"""
    finish(python(code, tmp_path))
    assert_same(ckpt.load(tmp_path, step=3), state_of(3))


@pytest.mark.parametrize("blocking", [True, False])
def test_an_interrupt_during_a_save_leaves_a_whole_step_or_none(tmp_path: Path, blocking: bool) -> None:
    """After Ctrl-C the step is whole or does not exist, the process ends, and the next save works."""
    code = """
import os, signal, sys, threading, time, ckpt
from helpers.states import state_of
from ckpt.storage.base.failpoints import set_failpoints
url, blocking = sys.argv[1], sys.argv[2] == "True"
ckpt.save(state_of(0), url, 0)
set_failpoints("save.stage=sleep:0.3@*,local.append=sleep:0.3@*")
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    ckpt.save(state_of(1), url, 1, blocking=blocking)
    time.sleep(5)
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
set_failpoints("")
try:
    ckpt.save(state_of(2), url, 2)
except ckpt.SaveFailed:
    ckpt.save(state_of(2), url, 2)
"""
    out = finish(python(code, tmp_path, blocking))
    assert "interrupted" in out
    steps = ckpt.open(tmp_path).steps()
    assert steps in ([0, 2], [0, 1, 2])
    for step in steps:
        assert_same(ckpt.load(tmp_path, step=step), state_of(step))
    assert_clean(tmp_path, folders=False)


def test_a_closed_checkpointer_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # threads of namespaces that other tests have opened
    with ckpt.Checkpointer(tmp_path) as saver:
        for step in range(3):
            saver.save(step, state_of(step))
        broken_save(tmp_path, saver)
        with pytest.raises(ckpt.SaveFailed):
            saver.wait()
    assert not [t for t in threading.enumerate() if t.name.startswith("ckpt") and t not in before]
