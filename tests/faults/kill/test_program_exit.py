"""A program that ends finishes its saves wherever they are written, and does not hang."""

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
from helpers.nodes import NodeProcess
from helpers.processes import stop

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
    """Return the URL of a namespace of four directories."""
    members = ", ".join(f'{{ url = "{tmp_path}/disk{i}", name = "disk{i}" }}' for i in range(4))
    (tmp_path / "config.toml").write_text(f'[namespaces.n]\nredundancy = "2x"\nmembers = [{members}]\n')
    monkeypatch.setenv("CKPT_CONFIG", str(tmp_path / "config.toml"))
    return "ckpt://n/run"


def start_program(code: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Start a Python process that runs this code, with more environment variables."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=os.environ | more, stderr=subprocess.PIPE, text=True)


def assert_ends_well(process: subprocess.Popen[str]) -> None:
    """Check that the process ends with status 0 and writes nothing to standard error, except about nodes that answer late."""
    try:
        _, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
    errors = [line for line in stderr.splitlines() if "gets no calls until it answers" not in line]
    assert (process.returncode, errors) == (0, [])


@pytest.mark.parametrize("how", ["blocking", "background"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_in_the_last_line_of_a_program_is_committed(namespace: str, tmp_path: Path, ranks: int, how: str) -> None:
    world = {"WORLD_SIZE": str(ranks), "CKPT_RUN_ID": tmp_path.name} if ranks > 1 else {}
    processes = [
        start_program(SAVE, namespace, how, **world, **({"RANK": str(rank)} if world else {})) for rank in range(ranks)
    ]
    for process in processes:
        assert_ends_well(process)
    assert ckpt.open(namespace).steps() == [1]


def test_the_end_of_a_program_does_not_recreate_a_deleted_repository(tmp_path: Path) -> None:
    """The end of the program releases the writer lease only where the repository still exists."""
    assert_ends_well(start_program(f"{SAVE}\nimport shutil; shutil.rmtree(sys.argv[1])", str(tmp_path / "r"), "blocking"))
    assert not [*tmp_path.iterdir()]


def test_the_end_of_a_program_finishes_an_unclosed_checkpointer(namespace: str) -> None:
    assert_ends_well(start_program(CHECKPOINTER, namespace))
    assert ckpt.open(namespace).steps() == [0, 1]
    assert ckpt.load(namespace)["a"][0] == 1


def test_the_end_of_a_program_does_not_wait_for_a_stopped_node(tmp_path: Path) -> None:
    """One node is stopped: the program does not wait for its pending requests to that node."""
    nodes = [NodeProcess(tmp_path / f"n{i}") for i in range(4)]
    url = f"ckpt://{','.join(node.address for node in nodes)}/run?redundancy=2x"
    try:
        assert_ends_well(start_program(SAVE, url, "blocking"))
        stop(nodes[0].process.pid)
        code = "import sys, time, ckpt; ckpt.load(sys.argv[1]); open(sys.argv[2], 'w').write(str(time.monotonic()))"
        process = start_program(code, url, str(tmp_path / "loaded"))
        assert process.wait(600) == 0
        assert time.monotonic() - float((tmp_path / "loaded").read_text()) < 10
    finally:
        os.kill(nodes[0].process.pid, signal.SIGCONT)
        for node in nodes:
            node.close()


def test_a_pool_starts_threads_up_to_its_limit_and_joins_them() -> None:
    release, most = threading.Event(), 3
    pool = DaemonThreadPool(most, "test-pool")
    assert pool.submit(lambda: 1).result(600) == 1
    blocked = [pool.submit(release.wait) for _ in range(most)]
    late = pool.submit(lambda: 2)
    assert sum(thread.name == "test-pool" for thread in threading.enumerate()) == most
    assert not late.done()
    release.set()
    assert late.result(600) == 2
    wait(blocked)
    assert list(pool.map(lambda x: x * x, range(100))) == [x * x for x in range(100)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(600)
    pool.shutdown()
    assert not any(thread.name == "test-pool" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="test-pool takes no work any more"):
        pool.submit(print)


def test_a_pool_that_shuts_down_cancels_work_that_has_not_started() -> None:
    release, begun = threading.Event(), threading.Event()
    pool = DaemonThreadPool(1, "test-pool")
    first = pool.submit(lambda: begun.set() or release.wait())
    second = pool.submit(lambda: 2)
    assert begun.wait(600)
    pool.shutdown(wait=False, cancel_futures=True)
    release.set()
    assert first.result(600) is True
    assert second.cancelled()


def test_a_garbage_collected_pool_ends_its_threads() -> None:
    pool = DaemonThreadPool(2, "test-forgotten")
    pool.submit(int).result(600)
    del pool
    deadline = time.monotonic() + 600
    while any(thread.name == "test-forgotten" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
