"""A namespace over node processes: nodes fail and return, and checkpoints are saved and loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.nodes import NodeProcess, node_processes, nodes_config, quick

import ckpt
from ckpt.storage.base.errors import (
    NotFound,
    Unavailable,
)
from ckpt.storage.testing import random_bytes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    with node_processes(tmp_path, 4) as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_file_is_written_with_full_redundancy_when_a_node_fails(processes: list[NodeProcess], number: int) -> None:
    namespace = quick(nodes_config(processes, deadline_seconds=3.0))
    namespace.put("before", random_bytes(5 << 20))
    data = random_bytes(48 << 20)
    with namespace.create("during", None, len(data), aligned=False) as writer:
        for i in range(12):
            if i == 4:
                processes[1].signal(number)
            writer.append(memoryview(data)[i * (4 << 20) : (i + 1) * (4 << 20)])
        writer.commit()
    assert namespace.get("during") == data
    assert namespace.get("before") == random_bytes(5 << 20)
    file = namespace.stat("during")
    assert file is not None
    assert file.layout is not None
    for stripe in file.layout.stripes:
        members_of_file = {file.layout.objects[f.object_index].member for f in stripe.fragments if f is not None}
        assert len(members_of_file) == 2, "the file has less redundancy than requested"
        assert processes[1].address not in members_of_file
    namespace.put("after", b"1")
    assert namespace.get("after") == b"1"
    namespace.delete(["before"])
    assert list(namespace.list()) == ["after", "during"]
    namespace.close()


def test_a_node_that_returns_undoes_no_change(processes: list[NodeProcess]) -> None:
    """Its old records and fragments do not undo changes that were made while it was away."""
    namespace = quick(nodes_config(processes, deadline_seconds=3.0))
    for i in range(12):
        namespace.put(f"kept{i}", b"old")
        namespace.put(f"gone{i}", random_bytes(40_000))
    processes[2].kill()
    namespace.delete([f"gone{i}" for i in range(12)])
    for i in range(12):
        namespace.put(f"kept{i}", b"new")
    processes[2].start()
    fresh = quick(nodes_config(processes, deadline_seconds=3.0))
    assert list(fresh.list()) == sorted(f"kept{i}" for i in range(12))
    assert all(fresh.get(f"kept{i}") == b"new" for i in range(12))
    for i in range(12):
        with pytest.raises(NotFound):
            fresh.get(f"gone{i}")
    for each in (namespace, fresh):
        each.close()


def test_too_few_nodes_are_reported(processes: list[NodeProcess]) -> None:
    namespace = quick(nodes_config(processes, deadline_seconds=2.0))
    namespace.put("a", random_bytes(100_000))
    for process in processes[:3]:
        process.kill()
    with pytest.raises(Unavailable, match=r"start"):
        namespace.put("b", b"1")
    with pytest.raises(Unavailable, match="can't be listed"):
        namespace.list()
    for process in processes[:3]:
        process.start()
    assert quick(nodes_config(processes)).get("a") == random_bytes(100_000)
    namespace.close()


def test_checkpoints_survive_nodes_lost_between_and_during_saves(
    processes: list[NodeProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """A node is lost between save and load, and another one in the middle of a save."""
    url = f"ckpt://{','.join(p.address for p in processes)}/run?redundancy=2x"
    state: dict[str, Any] = {"w": np.random.default_rng(0).standard_normal((512, 4096)), "step": 1}
    ckpt.save(state, url, 1)
    processes[0].kill()
    got = ckpt.load(url)
    assert np.array_equal(got["w"], state["w"])
    lost = f"{processes[0].address} gets no calls until it answers"
    error = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and lost in r.getMessage()]
    assert len(error) == 1
    assert "start it" in error[0]
    state["w"] += 1
    ckpt.save(state, url, 2, keep=1)
    processes[0].start()
    assert ckpt.open(url).steps() == [2]
    assert np.array_equal(ckpt.load(url)["w"], state["w"])


RANK = """
import os, sys
import numpy as np
import ckpt
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
whole = np.arange(4_000_000, dtype=np.float64).reshape(4000, 1000)
def mine():
    lines = np.array_split(np.arange(4000), size)[rank]
    return lines[0], whole[lines[0] : lines[-1] + 1]
first, part = mine()
if sys.argv[1] == "save":
    for step in range(2):
        ckpt.save({"w": ckpt.Shard(part + step, whole.shape, (first, 0)), "step": step}, sys.argv[2], step)
else:
    into = np.zeros_like(part)
    ckpt.load(sys.argv[2], like={"w": ckpt.Shard(into, whole.shape, (first, 0)), "step": 0})
    assert np.array_equal(into, part + 1)
print("done")
"""


def run_ranks(size: int, what: str, url: str) -> None:
    """Run processes that know of each other by their environment only."""
    made = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, what, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip
    for process in made:
        out, err = process.communicate(timeout=600)
        assert "done" in out, err


def test_many_ranks_save_and_load_through_a_namespace(processes: list[NodeProcess]) -> None:
    """The ranks meet at the namespace, save there together, and load with other numbers of ranks and one dead node."""
    url = f"ckpt://{','.join(p.address for p in processes)}/run"
    run_ranks(4, "save", url)
    processes[1].kill()
    run_ranks(2, "load", url)
    run_ranks(1, "load", url)
    assert ckpt.open(url).steps() == [0, 1]


def test_a_checkpoint_of_higher_redundancy_outlives_two_nodes(tmp_path: Path) -> None:
    """The namespace was created by a save at 2x; a step that is saved at 4+2 outlives any two nodes."""
    nodes = [NodeProcess(tmp_path / f"n{i}") for i in range(6)]
    try:
        url = f"ckpt://{','.join(n.address for n in nodes)}"
        ckpt.save({"w": np.arange(10.0)}, f"{url}/first", 1)
        state = {"w": np.random.default_rng(0).standard_normal((300, 1000)), "step": 1}
        ckpt.save(state, f"{url}/run?redundancy=4+2", 1)
        for node in nodes[2:4]:
            node.kill()
        program = (
            "import sys, ckpt, numpy as np; got = ckpt.load(sys.argv[1])\n"
            "print(np.array_equal(got['w'], np.random.default_rng(0).standard_normal((300, 1000))))"
        )
        command = [sys.executable, "-c", program, f"{url}/run?redundancy=4+2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.stdout == "True\n", done.stderr
    finally:
        for node in nodes:
            node.close()
