"""The threads that run as long as a node, a job or an agent continue after a momentary lack of memory, files or threads.

A thread that ends would stop repairs, announcements or the output without an error.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.etcd_members import FACTS
from helpers.etcd_server import EtcdProcess, needs_etcd, running_etcd  # noqa: F401  a fixture
from helpers.nodes import LocalNode, directories
from helpers.processes import until

import ckpt
from ckpt.aggregator.cluster.etcd import announce
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import scrub
from ckpt.aggregator.maintenance.repair_leader import RepairLeader
from ckpt.recovery.agent.log_console import LogConsole
from ckpt.saving import background_scrub
from ckpt.storage.base.errors import NotFound
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.node.upload_leases import UploadLeases
from ckpt.storage.testing import random_bytes

ERRORS = [MemoryError(), OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")]


class Failing:
    """A function whose first two calls fail."""

    def __init__(self, function: Callable[..., Any], error: Exception) -> None:
        self.calls = 0
        self._function, self._error = function, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls <= 2:
            raise self._error
        return self._function(*args, **kwargs)


@pytest.mark.parametrize("error", ERRORS)
def test_the_repair_leader_repairs_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with closing(Namespace(directories(tmp_path, 4))) as namespace:
        namespace.put("f", random_bytes(1_000_000, 0))
        namespace.settle(["/f"])
        shutil.rmtree(next(tmp_path.glob("disk*/objects")))
        repair = Failing(RepairLeader.repair_once, error)
        monkeypatch.setattr(RepairLeader, "repair_once", lambda *args, **kwargs: repair(*args, **kwargs))
        leader = RepairLeader(lambda: namespace, "me", 0.05)
        try:
            until(lambda: scrub.scrub_namespace(namespace).is_whole, "the namespace is whole again")
        finally:
            leader.close(60)


@needs_etcd
@pytest.mark.parametrize("error", ERRORS)
def test_a_node_stays_announced(server: EtcdProcess, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with closing(announce(server.endpoints, "lab", FACTS.address, FACTS, lease_seconds=2)) as announced:
        renewal = Failing(announced._renew_lease, error)
        monkeypatch.setattr(announced, "_renew_lease", renewal)
        until(lambda: renewal.calls >= 6)
        until(lambda: server.up() == {FACTS.address: True})


@pytest.mark.parametrize("error", ERRORS)
def test_a_node_ends_uploads_of_lost_clients_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    node = LocalNode(tmp_path, NodeOptions(lease_seconds=0.2))
    try:
        monkeypatch.setattr(node.server.uploads, "expire", Failing(node.server.uploads.expire, error))
        node.server.uploads.create("lost", 10)
        assert len(node.server.uploads) == 1
        until(lambda: not len(node.server.uploads))
    finally:
        node.close()


def test_an_upload_that_cannot_be_ended_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = UploadLeases(LocalStore(tmp_path), lambda promised: 1 << 40, lease_seconds=0.0)
    keys = [uploads.create(name, 10) for name in ("a", "b", "c")]
    writers = [uploads._uploads[key].writer for key in keys]
    aborted: list[int] = []
    for number, writer in enumerate(writers):

        def abort(number: int = number, end: Callable[[], None] = writer.abort) -> None:
            end()
            aborted.append(number)
            if number != 1:
                raise MemoryError

        monkeypatch.setattr(writer, "abort", abort)
    with pytest.raises(MemoryError):
        uploads.expire()
    assert sorted(aborted) == [0, 1, 2]
    for key in keys:
        with pytest.raises(NotFound):
            uploads.append(key, memoryview(b"x"))


@pytest.mark.parametrize("error", ERRORS)
def test_the_output_of_the_ranks_is_copied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    log = tmp_path / "0.log"
    log.write_text("a line\n")
    opened = Failing(Path.open, error)
    monkeypatch.setattr(Path, "open", lambda *args, **kwargs: opened(*args, **kwargs))
    console = LogConsole("all")
    ranks: Any = [SimpleNamespace(number=0, log=log, log_begin=0)]
    console.follow(ranks)
    until(lambda: opened.calls >= 3)
    console.close()
    assert capfd.readouterr().out == "a line\n"


@pytest.mark.parametrize("error", ERRORS)
def test_the_scrub_of_earlier_blocks_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(background_scrub, "FIRST_PASS_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(background_scrub, "PASS_INTERVAL_SECONDS", 0.05)
    with ckpt.Checkpointer(tmp_path, every=1, scrub=1 << 30) as ck:
        passes = Failing(ck._scrubber._run_pass, error)
        monkeypatch.setattr(ck._scrubber, "_run_pass", passes)
        state = {"same": np.arange(1e6), "step": np.zeros(1)}
        for step in range(3):  # from the second step on, one refers to an earlier one
            state["step"][:] = step
            ck.step(step, state)
            ck.wait()
        until(lambda: passes.calls >= 3)
    assert not [thread for thread in threading.enumerate() if thread.name == "ckpt-scrub" and thread.is_alive()]
