"""Nodes on this host as fixtures, their client, and the number of bytes that went through descriptors."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.testing import random_bytes
from helpers.nodes import LocalNode, NodeProcess

DATA = random_bytes(3 << 20)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """Yield a node in a process of its own."""
    made = NodeProcess(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def local_node(tmp_path: Path) -> Iterator[LocalNode]:
    """Yield a node in this process."""
    made = LocalNode(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def store(local_node: LocalNode) -> Iterator[NodeStore]:
    """Yield a client of the node in this process."""
    made = NodeStore(local_node.address, NodeCredentials(deadline_seconds=300))  # for a busy machine
    yield made
    made.close()


def bytes_by_way(node: NodeProcess | str) -> dict[str, float]:
    """Return the bytes of objects that a node has counted, by the way they were transferred."""
    monitor = node if isinstance(node, str) else f"127.0.0.1:{node.monitor}"
    with urllib.request.urlopen(f"http://{monitor}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'^ckpt_node_bytes_(\w+)_total\{verb="\w+"\} (\S+)$', text, re.MULTILINE)
    return {way: float(value) for way, value in found}


def open_objects() -> set[str]:
    """Return the objects that stay open in this process; a node in it ends its answer only after the client has it."""
    deadline = time.monotonic() + 600
    while found := open_objects_now():
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return found


def open_objects_now() -> set[str]:
    """Return the objects that are open in this process now."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing itself
            continue
        if "/objects/" in target:
            found.add(target)
    return found


def files(folder: Path) -> list[Path]:
    """Return the objects of a node."""
    return [p for p in (folder / "objects").rglob("*") if p.is_file()]
