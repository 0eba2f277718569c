"""Clients are killed while the replica set of a namespace changes."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from helpers.folders import TESTS
from helpers.nodes import NodeProcess, directories, nodes_config, quick
from helpers.processes import SOAK
from helpers.registers import Flaky, words
from helpers.replica_sets import (
    CONTENT,
    assert_all_files_exist,
    kill_at,
    locations_of,
    make_three_member_namespace,
    record_members,
)

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance, repair, scrub
from ckpt.aggregator.records.ring_change import change_ring, complete_ring_change
from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.registers.base import RegisterValue

POINTS = [
    "ring.joined", "ring.decided", "ring.moving", "ring.fenced", "ring.settled", "ring.decided@2", "ring.moved"
]  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("by", ["forget", "repair"])
def test_the_next_change_or_a_repair_completes_a_killed_ring_change(tmp_path: Path, point: str, by: str) -> None:
    """Clients that started before and after it work; the next change, or a repair, completes it."""
    make_three_member_namespace(tmp_path, 5)
    config = tmp_path / "config.toml"
    members = ", ".join(f'{{url = "{tmp_path}/disk{i}", name = "disk{i}"}}' for i in range(5))
    config.write_text(f"[namespaces.lab]\nmembers = [{members}]\n")
    program = (
        "from ckpt.aggregator.file_io.namespace import *; from ckpt.aggregator.records.ring_change import change_ring\n"
        "n, _ = open_namespace('ckpt://lab/'); change_ring(n, [s for s in n.locations if s.name != 'disk2'])"
    )
    environment = os.environ | {"CKPT_FAILPOINTS": kill_at(point), "CKPT_CONFIG": str(config)}
    before = Namespace(directories(tmp_path, 5, deadline_seconds=5.0))
    assert record_members(before) == {"disk0", "disk1", "disk2"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == -9
    before.put("d/f0", CONTENT["d/f0"])
    assert_all_files_exist(before)
    after = Namespace(directories(tmp_path, 5, deadline_seconds=5.0))
    assert_all_files_exist(after)
    after.put("d/f1", CONTENT["d/f1"])
    if by == "repair":
        repair.repair_namespace(after, scrub.scrub_namespace(after))
        assert after.ring.previous is None
        assert (
            record_members(after) == {"disk0", "disk1", "disk2"}
            if point == "ring.joined"
            else "disk2" not in record_members(after)
        )
    else:
        rebalance.remove_member(after, "disk2")
        assert record_members(after) == {"disk0", "disk1", "disk3", "disk4"}
        shutil.rmtree(tmp_path / "disk2")
    assert_all_files_exist(after)
    assert_all_files_exist(before)


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS[1:] if SOAK else ["ring.decided", "ring.settled", "ring.moved"])
def test_the_next_writer_completes_a_killed_growth_of_the_record_ring(tmp_path: Path, point: str) -> None:
    """The next writer completes it; no acknowledged file is lost meanwhile."""
    make_three_member_namespace(tmp_path, 6)
    rebalance.rebalance_fragments(grown := Namespace(directories(tmp_path, 6)))
    program = (
        "import sys; from pathlib import Path; from helpers.nodes import directories\n"
        "from ckpt.aggregator.file_io.namespace import Namespace\n"
        "Namespace(directories(Path(sys.argv[1]), 6, redundancy='4+2', deadline_seconds=1.0)).put('new', b'1')"
    )
    environment = os.environ | {"CKPT_FAILPOINTS": kill_at(point), "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == -9
    assert_all_files_exist(grown)
    after = Namespace(directories(tmp_path, 6, redundancy="4+2", deadline_seconds=1.0))
    after.put("d/new", b"2")
    assert after.delete(["d/new"])
    assert after.ring.can_tolerate(2, 6)
    assert_all_files_exist(after)
    assert_all_files_exist(grown)


SEEDS = [int(os.environ["CKPT_SEED"])] if "CKPT_SEED" in os.environ else range(300 if SOAK else 8)


class ChangingRing:
    """Clients that append words to values over registers that lose calls, and others that change the record ring meanwhile."""

    def __init__(self, folder: Path, seed: int) -> None:
        draw = random.Random(seed)
        self._folder, self._seed = folder, seed
        self._loss_rate = draw.choice([0.0, 0.02, 0.1])
        self._redundancy = draw.choice(["2x", "3x"])
        self._clients_done, self._changed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self.received: list[tuple[str, str | None, list[str]]] = []
        """The name of a register, the word added if any, and the words of the value that a client received."""
        assert self.open(draw.choice([3, 4, 5][self._redundancy == "3x" :])).ring

    def open(self, count: int = 6, **table: float) -> Namespace:
        """Return the namespace on the first `count` directories."""
        return Namespace(directories(self._folder, count, redundancy=self._redundancy, **table))

    def run(self) -> None:
        """Run four clients, and two others that change the ring until the clients have ended."""
        clients = [threading.Thread(target=self._append_words, args=(i,)) for i in range(4)]
        changers = [threading.Thread(target=self._change_repeatedly, args=(10 + i,)) for i in range(2)]
        for thread in clients + changers:
            thread.start()
        for thread in clients:
            thread.join()
        self._clients_done.set()
        for thread in changers:
            thread.join()

    def _open_flaky(self, number: int) -> Namespace:
        namespace, draw = self.open(deadline_seconds=3.0), random.Random(f"{self._seed} {number}")
        for name, member in namespace.open_members.items():
            namespace._member_registers[name] = member.registers = Flaky(member.registers, draw, self._loss_rate)
        namespace.fan_out.health._first_pause_seconds, namespace.fan_out.health._max_pause_seconds = 0.001, 0.01
        return namespace

    def _append_words(self, number: int) -> None:
        namespace, draw = self._open_flaky(number), random.Random(f"{self._seed} client {number}")
        for i in range(25):
            word, name = f"{number}.{i}", f"v{draw.randrange(3)}"
            try:
                if draw.random() < 0.4:
                    value_words, added = words(namespace.read_records([name])[name]), None
                else:
                    value_words, added = words(namespace.update_register(name, partial(with_word, word))), word
            except Unavailable:
                continue
            with self._lock:
                self.received.append((name, added, value_words))
            time.sleep(draw.random() * 0.02)

    def _change_repeatedly(self, number: int) -> None:
        namespace, draw = self._open_flaky(number), random.Random(f"{self._seed} change {number}")
        for number_of_changes in itertools.count():
            if self._clients_done.is_set() and (self._changed.is_set() or number_of_changes > 1000):
                return
            self._change(namespace, draw)
            time.sleep(draw.random() * 0.05)

    def _change(self, namespace: Namespace, draw: random.Random) -> None:
        next_members = draw.sample(range(6), draw.randint(2, 6))
        progress = break_off if draw.random() < 0.4 else lambda _: None
        try:
            change_ring(
                namespace, locations_of(namespace, *next_members), progress=progress, tolerated_losses=draw.choice([0, 2])
            )  # type: ignore[arg-type]
            if namespace.ring.epoch > 1:
                self._changed.set()
        except StoreError:
            namespace.invalidate_ring()


def with_word(word: str, _: str, value: RegisterValue | None) -> RegisterValue | None:
    """Return the value with one more word; None if it has the word."""
    present = words(value)
    return None if word in present else RegisterValue(b"", " ".join([*present, word]).encode())


def break_off(_: int) -> None:
    """Raise StoreError, to end a change of the ring in its middle."""
    raise StoreError("given up")


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_registers_keep_one_history_while_their_ring_changes(tmp_path: Path, seed: int) -> None:
    """Clients append words to values over registers that lose calls, while the record ring changes again and again and some
    changes break off. Each value that a client received is a prefix of the final value."""
    changing = ChangingRing(tmp_path, seed)
    changing.run()
    last = changing.open()
    complete_ring_change(last)
    for name in ("v0", "v1", "v2"):
        final = words(last.read_records([name])[name])
        assert len(set(final)) == len(final), "a word occurs twice"
        for register_name, added, value_words in changing.received:
            if register_name == name:
                assert final[: len(value_words)] == value_words, (
                    f"CKPT_SEED={seed}: a client received {value_words}, the final value is {final}"
                )
                assert added is None or added in value_words
    assert last.ring.epoch > 1, "no change was made"
    assert changing.received


def test_clients_continue_after_a_lost_node_was_replaced(tmp_path: Path) -> None:
    """Of four nodes one is lost for good, and a new one takes its place; a client that knows of neither change continues."""
    nodes = [NodeProcess(tmp_path / f"n{i}") for i in range(5)]
    try:
        client = quick(nodes_config(nodes[:4], redundancy="2x"))
        for path, data in CONTENT.items():
            client.put(path, data)
        client.delete(["many/0"])
        nodes[1].kill()
        url = "ckpt://" + ",".join(n.address for n in nodes)
        command = [sys.executable, "-m", "ckpt.tools.node", "admin", "forget", url, nodes[1].address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{nodes[1].address} is forgotten" in done.stdout
        assert "Exception" not in done.stderr
        client.put("after", b"by a client that knows of four")
        assert record_members(client) == {n.address for n in nodes} - {nodes[1].address}
        all_but_after = quick(nodes_config([nodes[i] for i in (0, 2, 3, 4)], redundancy="2x"))
        found = scrub.scrub_namespace(all_but_after, verify=True)
        assert found.is_whole, found
        nodes[2].kill()  # a second node is lost, too
        rest = quick(nodes_config([nodes[i] for i in (0, 2, 3, 4)], redundancy="2x"))
        assert rest.get("after") == b"by a client that knows of four"
        rest.delete(["after"])
        assert_all_files_exist(rest)
    finally:
        for node in nodes:
            node.close()
