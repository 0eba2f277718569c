"""`CkptTransport` passes torchft's own suite for transports, between threads and between processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from helpers.peers import NAMES, tls_variables
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Shard, distribute_tensor
from torchft.checkpointing import transport_test
from torchft.checkpointing.transport_test import TIMEOUT_REGEX, assertStateDictEqual, make_state_dict, run_multi_recovery_test

import ckpt
from ckpt.adapters.peer_address import open_peer
from ckpt.adapters.peer_memory import PeerMemory
from ckpt.adapters.torchft import CkptTransport
from ckpt.errors import Refused, Untrusted
from ckpt.tiers.memory_folder import own_memory_folder

CPU = torch.device("cpu")
SECONDS = timedelta(seconds=30)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_the_suite_of_torchft(sender: CkptTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, barrier = transport_test.as_completed, threading.Barrier  # its limits of 10 s are too short for a busy machine
    monkeypatch.setattr(transport_test, "as_completed", lambda futures, timeout: wait(futures, timeout=20 * timeout))
    barriers = SimpleNamespace(Barrier=lambda parties, timeout: barrier(parties, timeout=20 * timeout))
    monkeypatch.setattr(transport_test, "threading", barriers)
    sender.send_checkpoint([1], 1, {"w": torch.ones(1)}, SECONDS)  # the imports of the first call count in no timeout
    received(sender, 1)

    def init(rank: int, world_size: int) -> CkptTransport:
        return CkptTransport(lambda: make_state_dict(CPU))

    try:
        run_multi_recovery_test(TestCase(), init, CPU)
    finally:
        if dist.is_initialized():  # after a failure
            dist.destroy_process_group()


def state() -> dict[str, object]:
    """Return a state as torchft's Manager sends it: a model, an optimizer with its moments, and numbers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 400)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    user = {"default": {"model": model.state_dict(), "optim": optimizer.state_dict(), "half": torch.randn(70).bfloat16()}}
    return {"user": user, "torchft": {"step": 7, "batches_committed": 14}}


def received(sender: CkptTransport, step: int) -> object:
    receiver = CkptTransport()
    try:
        return receiver.recv_checkpoint(0, sender.metadata(), step, SECONDS)
    finally:
        receiver.shutdown()


@pytest.fixture
def sender():
    transport = CkptTransport()
    yield transport
    transport.shutdown()


def test_a_state_of_a_manager_arrives_equal(sender: CkptTransport) -> None:
    sender.send_checkpoint([1], 7, state(), SECONDS)
    found, expected = received(sender, 7), state()
    assert found["torchft"] == expected["torchft"]
    mine, others = found["user"]["default"], expected["user"]["default"]
    for name, tensor in others["model"].items():
        assert mine["model"][name].equal(tensor), name
    assert mine["half"].equal(others["half"])
    assert mine["optim"]["param_groups"] == others["optim"]["param_groups"]
    assert mine["optim"]["state"].keys() == others["optim"]["state"].keys()
    assert mine["optim"]["state"][0]["exp_avg"].equal(others["optim"]["state"][0]["exp_avg"])


def test_what_was_sent_is_a_copy(sender: CkptTransport) -> None:
    tensor = torch.ones(10)
    sender.send_checkpoint([1], 1, {"w": tensor}, SECONDS)
    sender.disallow_checkpoint()
    tensor.zero_()
    assert received(sender, 1)["w"].equal(torch.ones(10))


def test_a_step_is_sent_again_and_only_the_last_one_takes_memory(sender: CkptTransport) -> None:
    for step, value in ((1, 1.0), (2, 2.0), (2, 3.0), (1, 4.0)):  # after a failed quorum the step may be the same or lower
        sender.send_checkpoint([1], step, {"w": torch.full((3,), value)}, SECONDS)
        assert received(sender, step)["w"].tolist() == [value] * 3


def test_another_step_times_out(sender: CkptTransport) -> None:
    sender.send_checkpoint([1], 1, {"w": torch.ones(1)}, SECONDS)
    receiver = CkptTransport()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=TIMEOUT_REGEX):
        receiver.recv_checkpoint(0, sender.metadata(), 2, timedelta(seconds=0.5))
    assert 0.4 < time.monotonic() - started < 10
    receiver.shutdown()


def test_a_dead_peer_times_out(sender: CkptTransport) -> None:
    other = CkptTransport()
    metadata = other.metadata()
    other.shutdown()
    with pytest.raises(TimeoutError, match=TIMEOUT_REGEX):
        sender.recv_checkpoint(0, metadata, 2, timedelta(seconds=0.5))


def test_a_wrong_token_reads_nothing(sender: CkptTransport) -> None:
    sender.send_checkpoint([1], 1, {"w": torch.ones(1)}, SECONDS)
    _, _, where = sender.metadata().partition("@")
    with pytest.raises(Refused, match="token"):
        sender.recv_checkpoint(0, f"peer://{'0' * 32}@{where}", 1, timedelta(seconds=5))
    with pytest.raises(ckpt.InvalidArgument, match="lacks its token"):
        sender.recv_checkpoint(0, f"peer://{where}", 1, timedelta(seconds=5))
    with pytest.raises(ckpt.InvalidArgument, match="is not an address of a PeerMemory"):
        open_peer(where)


def test_a_peer_cannot_write(sender: CkptTransport) -> None:
    with pytest.raises(ckpt.CkptError, match="read-only"):
        open_peer(sender.metadata()).put("x", b"1")


def test_what_cannot_be_stored_is_refused_by_name(sender: CkptTransport) -> None:
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"user\.schedule"):
        sender.send_checkpoint([1], 1, {"user": {"schedule": lambda: 0}}, SECONDS)


@pytest.mark.usefixtures("one_process")
def test_a_dtensor_without_a_mesh_is_refused(sender: CkptTransport) -> None:
    sender.send_checkpoint([1], 1, make_state_dict(CPU), SECONDS)
    with pytest.raises(ckpt.InvalidArgument, match=r"this process none like it: give CkptTransport\(state_dict=\)"):
        received(sender, 1)


@pytest.mark.usefixtures("one_process")
def test_a_sharded_dtensor_of_a_moment_that_the_receiver_lacks(sender: CkptTransport) -> None:
    """A new optimizer has no moments yet: the mesh is that of its parameters."""
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("shard",))
    weight = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)])
    sender.send_checkpoint([1], 1, {"weight": weight, "moment": weight * 2}, SECONDS)
    receiver = CkptTransport(lambda: {"weight": weight})
    found = receiver.recv_checkpoint(0, sender.metadata(), 1, SECONDS)
    receiver.shutdown()
    assertStateDictEqual(TestCase(), found, {"weight": weight, "moment": weight * 2})
    assert isinstance(found["moment"], DTensor)


@pytest.mark.usefixtures("one_process")
def test_a_partial_dtensor_is_refused(sender: CkptTransport) -> None:
    tensor = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0]), [Partial()])
    with pytest.raises(ckpt.InvalidArgument, match="placement P"):
        sender.send_checkpoint([1], 1, {"w": tensor}, SECONDS)


# --- TLS: tests/integration/nodes/test_peer_memory.py has the faults of the network ---------------------------------


@pytest.fixture
def with_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    variables = tls_variables(tmp_path / "job", f"DNS:{socket.gethostname()}")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def test_a_transport_with_a_certificate_serves_other_hosts_over_tls(with_tls: dict[str, str]) -> None:
    transport = CkptTransport()
    try:
        assert transport.metadata().startswith(f"peer+tls://{socket.gethostname()}:")
        transport.send_checkpoint([1], 7, state(), SECONDS)
        assert received(transport, 7)["torchft"] == state()["torchft"]
    finally:
        transport.shutdown()


def test_a_peer_that_cannot_be_verified_ends_the_recovery(
    sender: CkptTransport, with_tls: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transport = CkptTransport()
    try:
        transport.send_checkpoint([1], 7, state(), SECONDS)
        monkeypatch.setenv("CKPT_CA_FILE", tls_variables(tmp_path / "other")["CKPT_CA_FILE"])
        started = time.monotonic()
        with pytest.raises(Untrusted, match="CKPT_CA_FILE"):
            sender.recv_checkpoint(0, transport.metadata(), 7, timedelta(seconds=600))
        assert time.monotonic() - started < 60
    finally:
        transport.shutdown()


def test_beyond_loopback_without_tls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ckpt.InvalidArgument, match="set CKPT_TOKEN_FILE, CKPT_TLS_CERT_FILE, CKPT_TLS_KEY_FILE, CKPT_CA_FILE"):
        CkptTransport(host="10.0.0.5")


# --- processes ---------------------------------------------------------------------------------------------------

SENDER = """
import sys, time
from datetime import timedelta
import torch
from ckpt.adapters.torchft import CkptTransport
transport = CkptTransport()
transport.send_checkpoint([1], 3, {"w": torch.arange(5_000_000.0), "n": 5}, timedelta(seconds=30))
print(transport.metadata(), flush=True)
time.sleep(600)
"""


def start_sender() -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_between_processes_and_a_killed_sender() -> None:
    """A receiver of a killed sender times out, and the memory of the killed process is freed by the next one."""
    process, metadata = start_sender()
    receiver = CkptTransport()
    try:
        found = receiver.recv_checkpoint(0, metadata, 3, SECONDS)
        assert found["w"].equal(torch.arange(5_000_000.0))
        assert found["n"] == 5
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(TimeoutError, match=TIMEOUT_REGEX):
            receiver.recv_checkpoint(0, metadata, 3, timedelta(seconds=1))
    finally:
        process.kill()
        process.wait()
        receiver.shutdown()
    (left,) = own_memory_folder().glob(f"peer-{process.pid}-*")
    old = time.time() - 1000
    os.utime(left, (old, old))
    with PeerMemory():
        assert not left.exists()


def test_a_closed_memory_is_freed() -> None:
    with PeerMemory() as memory:
        folder = Path(memory._folder)
        assert folder.exists()
    assert not folder.exists()
