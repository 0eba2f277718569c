"""Clients and nodes of a namespace are stopped, killed and cut off: what the clients see is what one register would return."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.folders import TESTS
from helpers.linearizability import Call, is_linearizable, shortest_wrong_prefix
from helpers.nodes import Link, NodeProcess
from helpers.processes import SOAK, python_path, stop, until

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair, scrub

NODES, CLIENTS = 4, 3
CALLS = 1000 if SOAK else 150
"""Of all clients of a history."""

SEEDS = [int(os.environ["CKPT_SEED"])] if "CKPT_SEED" in os.environ else range(100 if SOAK else 2)


def configuration(addresses: list[str]) -> dict[str, Any]:
    """Return the table of a namespace whose members have the same names for all clients."""
    members = [{"url": address, "name": f"n{i}"} for i, address in enumerate(addresses)]
    return {"members": members, "redundancy": "2x", "deadline_seconds": 2.0}


class Client:
    """A process that calls the namespace, through connections of its own to each node."""

    def __init__(
        self, folder: Path, name: str, nodes: list[NodeProcess], seed: int, calls: int, offset: float, program: str
    ) -> None:
        self.name, self._seed = name, seed
        self.log = folder / f"{name}.jsonl"
        self.links = [Link(node.address) for node in nodes]
        table = configuration([link.address for link in self.links])
        path = TESTS / "programs" / program
        self.process = subprocess.Popen(
            [sys.executable, str(path), name, str(seed), str(calls), str(self.log), str(offset), json.dumps(table)],
            env=os.environ | {"PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1"}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def calls(self) -> dict[str, list[Call]]:
        """Return the calls for each file. Those without an end have an unknown outcome."""
        began, ended = {}, {}
        for line in self.log.read_text().splitlines() if self.log.exists() else []:
            entry = json.loads(line)
            (began if "kind" in entry else ended)[entry["number"]] = entry
        found: dict[str, list[Call]] = {}
        for number, first in began.items():
            last = ended.get(number, {})
            call = Call(
                self.name, first["kind"], first["began"], last.get("ended", math.inf),
                None if first["kind"] in ("get", "delete") else first["value"], last.get("result"),
            )  # fmt: skip
            found.setdefault(first["file"], []).append(call)
        return found

    def close(self) -> str:
        """Wait for the end, and return the exit status of the process and what it printed if it failed."""
        self.process.send_signal(signal.SIGCONT)
        _, errors = self.process.communicate(timeout=300)
        for link in self.links:
            link.close()
        status = self.process.returncode
        return f"{self.name} ended with status {status}: {errors}" if status not in (0, -signal.SIGKILL) else ""


class Faults:
    """Faults one after the other, at most one of a node at a time. Any number of connections of clients may be cut."""

    def __init__(self, draw: random.Random, nodes: list[NodeProcess], clients: list[Client]) -> None:
        self._draw, self._nodes, self._clients = draw, nodes, clients
        self.log: list[str] = []

    def next(self, kinds: Sequence[str]) -> None:
        """Make one fault of these kinds, and mend it."""
        kind = self._draw.choice(kinds)
        self.log.append(kind)
        getattr(self, kind)()

    def _pause(self, most: float) -> None:
        time.sleep(self._draw.uniform(0.05, most))

    def stop_node(self) -> None:
        node = self._draw.choice(self._nodes)
        node.signal(signal.SIGSTOP)
        self._pause(3.0)  # the deadline of a client is 2 s
        node.signal(signal.SIGCONT)

    def kill_node(self) -> None:
        node = self._draw.choice(self._nodes)
        node.kill()
        self._pause(1.0)
        node.start()

    def empty_node(self) -> None:
        """A new disk replaces that of a node, and a repair restores what it had."""
        node = self._draw.choice(self._nodes)
        node.kill()
        shutil.rmtree(node.folder)
        node.start()
        namespace = Namespace(config_from_table("test", configuration([node.address for node in self._nodes]), "the test"))
        until(lambda: not repair.repair_namespace(namespace, scrub.scrub_namespace(namespace)).failed, "a repair of all files")
        namespace.close()

    def stop_client(self) -> None:
        client = self._draw.choice(self._clients)
        if client.process.poll() is None:
            stop(client.process.pid)
            self._pause(2.0)
            client.process.send_signal(signal.SIGCONT)

    def hold_links(self) -> None:
        links = self._some_links()
        for link in links:
            link.hold(True)
        self._pause(3.0)
        for link in links:
            link.hold(False)

    def sever_links(self) -> None:
        links = self._some_links()
        for link in links:
            link.sever()
        self._pause(1.0)
        for link in links:
            link.cut = False

    def _some_links(self) -> list[Link]:
        return [self._draw.choice(client.links) for client in self._draw.sample(self._clients, self._draw.randint(1, CLIENTS))]


KINDS = ("stop_node", "stop_node", "kill_node", "stop_client", "stop_client", "hold_links", "sever_links")
"""The faults of a history, each as often as it is here."""


def calls_of_clients(
    folder: Path, seed: int, kinds: Sequence[str] = KINDS, program: str = "namespace_client.py"
) -> tuple[dict[str, list[Call]], list[str]]:
    """Run clients with faults, and return the calls for each file, and the faults. program: of the clients."""
    draw = random.Random(seed)
    print(f"CKPT_SEED={seed}")
    nodes = [NodeProcess(folder / f"n{i}") for i in range(NODES)]
    clients: list[Client] = []
    try:
        clients += [
            Client(folder, f"c{i}", nodes, draw.randrange(1 << 30), CALLS // CLIENTS, draw.uniform(-600, 600), program)
            for i in range(CLIENTS)
        ]
        faults = Faults(draw, nodes, clients)
        killed = draw.choice(clients)
        for number in range(10_000):
            if all(client.process.poll() is not None for client in clients):
                break
            faults.next(kinds)
            if number == 3:  # its last call has an unknown outcome
                killed.process.kill()
    finally:
        failures = [text for client in clients if (text := client.close())]
        for node in nodes:
            node.close()
    assert not failures, failures
    histories: dict[str, list[Call]] = {}
    for client in clients:
        for file, calls in client.calls().items():
            histories.setdefault(file, []).extend(calls)
    return histories, faults.log


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_what_clients_see_is_what_one_register_returns(tmp_path: Path, seed: int) -> None:
    """Each file is a register. Clients with clocks that are wrong by minutes write, replace, delete and read three files."""
    histories, faults = calls_of_clients(tmp_path, seed)
    ended = [call for calls in histories.values() for call in calls if not call.is_unknown]
    print(len(ended), "of", sum(map(len, histories.values())), "calls ended;", faults)
    assert len(ended) > CALLS // 4, "most calls failed, so the history says nothing"
    for file, calls in histories.items():
        if not is_linearizable(calls):
            wrong = "\n".join(str(call) for call in shortest_wrong_prefix(calls)[-30:])
            pytest.fail(f"CKPT_SEED={seed}: {file} is not a register, with the faults {faults}:\n{wrong}")


@pytest.mark.soak
def test_clients_that_read_from_one_member_are_found(tmp_path: Path) -> None:
    """A node that one client can not reach has old records, and another client that asks only this node sees them."""
    for seed in range(10):
        histories, _ = calls_of_clients(tmp_path / str(seed), seed, ["sever_links"], "hasty_namespace_client.py")
        if not all(map(is_linearizable, histories.values())):
            print(f"seed {seed} has found it")
            return
    pytest.fail("10 seeds found nothing")
