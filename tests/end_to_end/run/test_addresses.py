"""Ports, addresses and rank numbers that ckpt-run gives to its ranks."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers.runs import have_ended

from ckpt.recovery.ranks import launch, processes
from ckpt.recovery.ranks.host_identity import host_address
from ckpt.recovery.ranks.launch import free_port, start_ranks
from ckpt.recovery.ranks.rank_environment import LaunchSpec
from ckpt.recovery.ranks.stop_ranks import stop_ranks
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.base.http_pages import HttpPage, HttpPages


def test_an_ended_rank_is_not_reaped_before_its_session_has_ended(tmp_path: Path) -> None:
    """Otherwise another process might get its number, and be killed in its place."""
    share = LaunchSpec("r", 0, 0, 1, 1, 0, "127.0.0.1", 1, {})
    command = ["sh", "-c", "sleep 1000 & echo $! > $0; exit 3", str(tmp_path / "child")]
    (rank,) = start_ranks(command, share, tmp_path, tmp_path / "logs")
    deadline = time.monotonic() + 600
    while not rank.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert rank.status == 3
    assert processes.process_state(rank.process.pid) == "Z"
    child = int((tmp_path / "child").read_text())
    assert processes.process_state(child) not in ("", "Z")
    stop_ranks([rank], "")
    assert processes.process_state(rank.process.pid) == ""
    assert have_ended([child])


@pytest.mark.parametrize("failing", [1, 2])
def test_no_rank_runs_after_a_start_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Also not the one that was started before its descriptor could not be opened."""
    opened: list[int] = []
    real = os.pidfd_open

    def open_pidfd(pid: int) -> int:
        opened.append(pid)
        if len(opened) == failing:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(pid)

    share = LaunchSpec("r", 0, 0, 2, 2, 0, "127.0.0.1", 1, {})
    monkeypatch.setattr(os, "pidfd_open", open_pidfd)
    with pytest.raises(Unavailable, match="Too many open files"):
        start_ranks(["sleep", "1000"], share, tmp_path, tmp_path / "logs")
    assert len(opened) == failing
    assert [pid for pid in opened if processes.process_state(pid) not in ("", "Z")] == []


def test_a_free_port_is_below_the_range_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives ports of its own range to connections, at any moment before rank 0 listens."""
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port("127.0.0.1") for _ in range(50)}
    assert len(found) > 40
    assert max(found) < least
    monkeypatch.setattr(launch, "_first_ephemeral_port", lambda: 2000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [port])
        assert free_port("127.0.0.1") not in (0, port)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_ipv6_addresses_are_listened_on_and_written_in_brackets() -> None:
    assert host_address("etcd://[::1]:2379/lab") == "::1"
    with socket.socket(socket.AF_INET6) as free:
        free.bind(("::1", free_port("::1")))
    web = HttpPages("::1", 0, {"/": lambda: HttpPage(b"here")}, "test")
    try:
        assert urllib.request.urlopen(f"http://[::1]:{web.port}/").read() == b"here"
    finally:
        web.close()


def test_spares_are_counted_among_the_hosts_of_a_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), "--spares", "1"]
    environ = os.environ | {"SLURM_STEP_NUM_NODES": "3"}
    command += ["--launcher", "slurm", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environ)
    assert "2 hosts share no file for the log of the run" in done.stderr


@pytest.mark.parametrize("by_pmi2", [{}, {"PMI_SIZE": "2", "PMI_RANK": "0"}], ids=["srun", "srun --mpi=pmi2"])
def test_the_only_rank_that_is_left_is_not_one_of_several_tasks_of_slurm(tmp_path: Path, by_pmi2: dict[str, str]) -> None:
    """After the loss of a host, as with `-n 1 --nnodes 2 --min 1`, the agents of the step are more than the ranks."""
    environ = os.environ | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"} | by_pmi2
    program = "from ckpt.groups.launchers import rank_from_env; print(rank_from_env().size)"
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), "--restarts", "0"]
    command += ["--launcher", "slurm", "--nnodes", "1", "--", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environ)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
