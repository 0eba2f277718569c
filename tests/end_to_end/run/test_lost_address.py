"""A job continues although the address of its host is gone when its ranks are to start again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from helpers.faulty_runs import Starter, assert_ends_well
from helpers.faulty_runs import start as start

ADDRESS = f"10.77.{os.getpid() % 250}.{os.getpid() // 250 % 250 + 1}"


def change_address(action: str) -> bool:
    command = ["ip", "address", action, f"{ADDRESS}/32", "dev", "lo"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(autouse=True)
def _own_address() -> Iterator[None]:
    if not change_address("add"):
        pytest.skip("adding an address takes root")
    yield
    change_address("del")


def test_ranks_start_again_while_the_address_of_the_host_is_gone(start: Starter) -> None:
    """A network that goes down takes the address of its interface with it. No port can be bound there then."""
    run = start("--address", ADDRESS, seconds=0.05)
    run.until_step(12)
    assert change_address("del")
    os.kill(run.pid(1), signal.SIGKILL)
    assert_ends_well(run)
    assert [cause for cause, _ in run.failures()] == ["signal"]
