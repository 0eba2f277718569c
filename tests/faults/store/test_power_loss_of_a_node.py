"""After a power loss at any moment, a node has all that it acknowledged, and serves nothing that is not whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.crash_states import CrashState
from helpers.folders import PROGRAMS
from helpers.mounts import why_no_fuse
from helpers.node_calls import NODE_CALLS, NODE_RESTART, QUARANTINE_CALL, objects_after, register_calls_after
from helpers.nodes import LocalNode, NodeProcess
from helpers.power_loss import first_wrong, recording_mount
from helpers.processes import SOAK, python_path
from helpers.register_calls import report, reports_after_each_call

import ckpt
from ckpt.storage.node.client import NodeStore

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")

NODE = "nodes/a"

CLIENT = """
import sys
from ckpt.storage.node.client import NodeStore
from helpers.node_calls import NODE_CALLS
from helpers.power_loss import acknowledge

mount, address, begin, end = sys.argv[1:]
store = NodeStore(address)
acknowledge(mount, f"identity-{store.info().identity}")
for number in range(int(begin), int(end)):
    NODE_CALLS[number].call(store)
    acknowledge(mount, number)
"""

FSYNCS = ["sync_file", "sync_nearest_folder", "sync_folder", "make_durable_root", "synchronous=NORMAL"]

WrongIn = Callable[[CrashState, Path], str | None]


def record_node(folder: Path, monkeypatch: pytest.MonkeyPatch, left_out: str = "nothing") -> Path:
    """Record a node process that is killed once and started again, and return the log."""
    with recording_mount(folder) as recording:
        monkeypatch.setenv("PYTHONPATH", python_path())
        monkeypatch.setenv("CKPT_LOCAL_FILE_SYSTEMS", str(recording.mount))
        program = (str(PROGRAMS / "recorded_node.py"), left_out)
        # The client writes first through descriptors of the node, then over the wire.
        for options, begin, end in ((), 0, NODE_RESTART), (("--no-fd-passing",), NODE_RESTART, len(NODE_CALLS)):
            node = NodeProcess(recording.mount / NODE, *options, program=program)
            try:
                recording.run(CLIENT, node.address, str(begin), str(end))
            finally:
                node.kill()
    return recording.log


@pytest.fixture
def wrong_in_node(tmp_path: Path) -> WrongIn:
    """Return a function that returns what is wrong in a state."""
    return partial(what_is_wrong, reports_after_each_call(tmp_path))


def what_is_wrong(reports: list[object], state: CrashState, folder: Path) -> str | None:
    """Start the node on a state. Return what is wrong, None if it has all acknowledged calls, and takes the next ones."""
    identities = {name.partition("-")[2] for name in state.acknowledged if name.startswith("identity-")}
    count = sum(name.isdecimal() for name in state.acknowledged)
    try:
        with contextlib.closing(LocalNode(folder / NODE)) as node, contextlib.closing(NodeStore(node.address)) as store:
            if identities and store.info().identity not in identities:
                return "the node has another identity"
            return (
                wrong_in_objects(store, count)
                or wrong_in_quarantine(folder / NODE / "quarantine", count)
                or wrong_in_registers(store, reports, count)
                or wrong_in_next_calls(store)
            )
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"


def wrong_in_objects(store: NodeStore, count: int) -> str | None:
    """Return which object is not as before or after the next call, None if there is none."""
    before, after = objects_after(count), objects_after(count + 1)
    found = {entry.name: store.get(entry.name) for entry in store.list()}
    for name in found.keys() | before.keys() | after.keys():
        if found.get(name) not in (before.get(name), after.get(name)):
            return f"{name} is {found.get(name, b'missing')[:16]!r} …, {len(found.get(name, b''))} bytes"
    used = store.info().used_bytes
    return None if used == sum(map(len, found.values())) else f"{used} bytes are counted as used"


def wrong_in_quarantine(quarantine: Path, count: int) -> str | None:
    """Return a text if an object was moved to the quarantine, and is not there."""
    moved = objects_after(QUARANTINE_CALL)["packs/two"]
    is_there = any(path.read_bytes() == moved for path in quarantine.glob("packs_two-*"))
    return None if is_there or count <= QUARANTINE_CALL else "the quarantined object is lost"


def wrong_in_registers(store: NodeStore, reports: list[object], count: int) -> str | None:
    """Return what the registers report, None if it is what they report before or after the next call."""
    first, last = register_calls_after(count), register_calls_after(count + 1)
    found = report(store.registers)
    return None if found in reports[first : last + 1] else f"after {first} calls, the registers report {str(found)[:200]}"


def wrong_in_next_calls(store: NodeStore) -> str | None:
    """Return what is wrong if the node does not take another object."""
    with store.create("x/y/next") as writer:
        writer.append(memoryview(b"next" * 5000))
        writer.commit()
    return None if store.get("x/y/next") == b"next" * 5000 else "the next object is not found"


@pytest.mark.soak
def test_acknowledged_calls_survive_a_power_loss_of_a_node_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_in_node: WrongIn, count_cases: CountCases
) -> None:
    amount = (10, 1.0) if SOAK else (1, 0.1)
    assert first_wrong(record_node(tmp_path, monkeypatch), wrong_in_node, *amount, count_cases=count_cases) is None


@pytest.mark.parametrize("left_out", FSYNCS)
def test_a_missing_fsync_of_a_node_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_in_node: WrongIn, left_out: str
) -> None:
    """Else the test above could not fail."""
    assert first_wrong(record_node(tmp_path, monkeypatch, left_out), wrong_in_node, 1) is not None
