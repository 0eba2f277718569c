"""Work that is under way when a program ends is finished, wherever it is written, and nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
from helpers.nodes import Process

import ckpt
from ckpt.storage.base.threads import DaemonThreadPool

SAVE = """
import sys, ckpt, numpy as np
ckpt.save({"a": np.arange(3_000_000)}, sys.argv[1], step=1, blocking=sys.argv[2] == "blocking")
"""
CHECKPOINTER = """
import sys, ckpt, numpy as np
saver = ckpt.Checkpointer(sys.argv[1])
for step in range(2):
    saver.save(step, {"a": np.arange(3_000_000) + step})
"""


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of four directories."""
    members = ", ".join(f'{{ url = "{tmp_path}/disk{i}", name = "disk{i}" }}' for i in range(4))
    (tmp_path / "config.toml").write_text(f'[namespaces.n]\nredundancy = "2x"\nmembers = [{members}]\n')
    monkeypatch.setenv("CKPT_CONFIG", str(tmp_path / "config.toml"))
    return "ckpt://n/run"


def started(code: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=os.environ | more, stderr=subprocess.PIPE, text=True)


def ends_well(process: subprocess.Popen[str]) -> None:
    try:
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert (process.returncode, said) == (0, "")


@pytest.mark.parametrize("how", ["blocking", "background"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_as_the_last_line(namespace: str, tmp_path: Path, ranks: int, how: str) -> None:
    told = {"WORLD_SIZE": str(ranks), "CKPT_RUN_ID": tmp_path.name} if ranks > 1 else {}
    processes = [started(SAVE, namespace, how, **told, **({"RANK": str(rank)} if told else {})) for rank in range(ranks)]
    for process in processes:
        ends_well(process)
    assert ckpt.open(namespace).steps() == [1]


def test_a_folder_that_was_removed_stays_so(tmp_path: Path) -> None:
    """The end of the program gives back the right to write there, if there is any there."""
    ends_well(started(f"{SAVE}\nimport shutil; shutil.rmtree(sys.argv[1])", str(tmp_path / "r"), "blocking"))
    assert not [*tmp_path.iterdir()]


def test_a_checkpointer_that_nobody_closes(namespace: str) -> None:
    ends_well(started(CHECKPOINTER, namespace))
    assert ckpt.open(namespace).steps() == [0, 1]
    assert ckpt.load(namespace)["a"][0] == 1


def test_an_end_waits_for_no_node(tmp_path: Path) -> None:
    """One stands still: the program does not wait for what it has asked that one."""
    nodes = [Process(tmp_path / f"n{i}") for i in range(4)]
    url = f"ckpt://{','.join(node.address for node in nodes)}/run?redundancy=2x"
    try:
        ends_well(started(SAVE, url, "blocking"))
        os.kill(nodes[0].process.pid, signal.SIGSTOP)
        code = "import sys, time, ckpt; ckpt.load(sys.argv[1]); open(sys.argv[2], 'w').write(str(time.monotonic()))"
        process = started(code, url, str(tmp_path / "loaded"))
        assert process.wait(100) == 0
        assert time.monotonic() - float((tmp_path / "loaded").read_text()) < 10
    finally:
        os.kill(nodes[0].process.pid, signal.SIGCONT)
        for node in nodes:
            node.close()


def test_threads_are_started_as_they_are_needed() -> None:
    go, most = threading.Event(), 3
    pool = DaemonThreadPool(most, "test-pool")
    assert pool.submit(lambda: 1).result(30) == 1
    blocked = [pool.submit(go.wait) for _ in range(most)]
    late = pool.submit(lambda: 2)
    assert sum(thread.name == "test-pool" for thread in threading.enumerate()) == most
    assert not late.done()
    go.set()
    assert late.result(30) == 2
    wait(blocked)
    assert list(pool.map(lambda x: x * x, range(100))) == [x * x for x in range(100)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(30)
    pool.shutdown()
    assert not any(thread.name == "test-pool" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="test-pool takes no work any more"):
        pool.submit(print)


def test_what_no_thread_has_begun_is_not_done() -> None:
    go, begun = threading.Event(), threading.Event()
    pool = DaemonThreadPool(1, "test-pool")
    first = pool.submit(lambda: begun.set() or go.wait())
    second = pool.submit(lambda: 2)
    assert begun.wait(30)
    pool.shutdown(wait=False, cancel_futures=True)
    go.set()
    assert first.result(30) is True
    assert second.cancelled()


def test_a_pool_that_is_forgotten_ends_its_threads() -> None:
    pool = DaemonThreadPool(2, "test-forgotten")
    pool.submit(int).result(30)
    del pool
    until = time.monotonic() + 30
    while any(thread.name == "test-forgotten" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
