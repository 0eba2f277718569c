"""A node on this host, its client, and how many bytes went through descriptors."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage.testing import random_bytes
from helpers.nodes import Here, Process

DATA = random_bytes(3 << 20)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    made = Here(tmp_path / "data")
    yield made
    made.close()


def moved(node: Process | str) -> dict[str, float]:
    """Bytes of objects that a node counted, by the way they went."""
    monitor = node if isinstance(node, str) else f"127.0.0.1:{node.monitor}"
    with urllib.request.urlopen(f"http://{monitor}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'^ckpt_node_bytes_(\w+)_total\{verb="\w+"\} (\S+)$', text, re.MULTILINE)
    return {what: float(value) for what, value in found}


def opened() -> set[str]:
    """The objects, of any node, that this process keeps open; a node in this process ends an answer after its client has it."""
    until = time.monotonic() + 20
    while found := _open_now():
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return found


def _open_now() -> set[str]:
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
    return [p for p in (folder / "objects").rglob("*") if p.is_file()]
