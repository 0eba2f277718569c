"""The states in which a power loss may leave a file system, from a recording of its changes.

`recording_mount.py` records. A change is *durable* after an fsync of its file (for bytes and lengths) or of its folder (for
names). Each other change before the power loss may be on the disk or not: POSIX promises no order. A write of several pages may
be on the disk in part. A rename is on the disk as a whole or not at all.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

PAGE_BYTES = 4096
ROOT = 1
NAME_CHANGES = ("create", "mkdir", "remove", "rename", "link")


@dataclass(frozen=True)
class Change:
    """One line of a recording: its kind and its values."""

    kind: str
    values: tuple[Any, ...]

    def synced_by(self) -> set[int]:
        """Return the numbers of the files or folders whose fsync makes it durable: all of them are needed."""
        if self.kind == "rename":
            return {self.values[0], self.values[2]}
        return {self.values[0]}


@dataclass(frozen=True)
class CrashState:
    """What a power loss left: the content of each file, and how it came about."""

    files: dict[str, bytes]
    folders: list[str]
    acknowledged: list[str]
    """What the program considered durable before the power loss."""
    where: str
    """The number of changes before the power loss, and those that are lost, for messages."""

    def write_to(self, root: Path) -> None:
        """Make these folders and files below a folder."""
        root.mkdir(parents=True, exist_ok=True)
        for folder in self.folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (root / name).write_bytes(content)


def leave_out(name: str, *modules: Any) -> None:
    """Replace a function that makes something durable, in each of these modules, by one that only makes the folder, if any.

    name: "FUNCTION in THREAD" leaves it out in the threads of this name only. "synchronous=…" lets all connections of SQLite in
        this process have this setting instead of theirs.
    """
    if name.startswith("synchronous="):
        sqlite3.connect = partial(sqlite3.connect, factory=_connection_with(name))  # type: ignore[misc, assignment]
        return
    function, _, thread = name.partition(" in ")
    for module in modules:
        if hasattr(module, function):
            setattr(module, function, _without_fsync(function, thread, getattr(module, function)))


def _without_fsync(function: str, thread: str, original: Any) -> Any:
    def call(path: Any, *arguments: Any) -> None:
        if thread and threading.current_thread().name != thread:
            original(path, *arguments)
        elif function == "make_durable_root":
            os.makedirs(path, exist_ok=True)

    return call


def _connection_with(setting: str) -> type[sqlite3.Connection]:
    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            return super().execute(f"PRAGMA {setting}" if "PRAGMA synchronous" in sql else sql, *arguments)

    return Connection


def read_recording(log: Path) -> list[Change]:
    """Return the changes in a log of `recording_mount.py`."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [Change(kind, tuple(values)) for kind, *values in lines]


def crash_states(changes: list[Change], draw: random.Random, samples: int, share: float = 1.0) -> Iterator[CrashState]:
    """Yield, for each moment: the state with all changes before it, that with the durable ones alone, and random ones between.

    samples: the number of random states of each moment. share: the share of the moments, drawn at random.
    """
    for count in range(1, len(changes) + 1):
        if all(change.kind in ("fsync", "acknowledged") for change in changes[count - 1 : count + 1]) and count < len(changes):
            continue  # the next moment has the same changes, and is stricter
        if draw.random() >= share:
            continue
        before = changes[:count]
        uncertain = _uncertain(before)
        yield _state(before, set(), draw, count)
        if uncertain:
            yield _state(before, set(uncertain), draw, count)
        for _ in range(samples if len(uncertain) > 1 else 0):
            yield _state(before, {number for number in uncertain if draw.random() < 0.5}, draw, count)


def _uncertain(changes: list[Change]) -> list[int]:
    """Return the indexes of the changes that are not durable."""
    last_sync: dict[int, int] = {}
    for index, change in enumerate(changes):
        if change.kind == "fsync":
            last_sync[change.values[0]] = index
    return [
        index
        for index, change in enumerate(changes)
        if change.kind not in ("fsync", "acknowledged")
        and any(last_sync.get(number, -1) < index for number in change.synced_by())
    ]


@dataclass
class _Disk:
    """Files and folders by number, and what folders contain."""

    content: dict[int, bytearray] = field(default_factory=dict)
    entries: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    def apply(self, change: Change) -> None:
        match change.kind, change.values:
            case "mkdir", (folder, name, number):
                self.entries.setdefault(number, {})
                self.entries.setdefault(folder, {})[name] = number
            case (("create" | "link"), (folder, name, number)):
                self.content.setdefault(number, bytearray())
                self.entries.setdefault(folder, {})[name] = number
            case "remove", (folder, name):
                self.entries.setdefault(folder, {}).pop(name, None)
            case "rename", (folder, name, new_folder, new_name):
                number = self.entries.setdefault(folder, {}).pop(name, None)
                if number is not None:
                    self.entries.setdefault(new_folder, {})[new_name] = number
            case "write", (number, offset, data):
                self.write(number, offset, base64.b64decode(data))
            case "truncate", (number, length):
                content = self.content.setdefault(number, bytearray())
                del content[length:]
                content.extend(bytes(length - len(content)))

    def write(self, number: int, offset: int, data: bytes) -> None:
        content = self.content.setdefault(number, bytearray())
        content.extend(bytes(max(0, offset + len(data) - len(content))))
        content[offset : offset + len(data)] = data

    def walk(self, folder: int = ROOT, path: str = "") -> Iterator[tuple[str, int]]:
        """Yield the path and the number of everything that can be reached from the root."""
        for name, number in self.entries.get(folder, {}).items():
            yield f"{path}{name}", number
            if number in self.entries:
                yield from self.walk(number, f"{path}{name}/")


def _state(changes: list[Change], lost: set[int], draw: random.Random, count: int) -> CrashState:
    disk = _Disk()
    for index, change in enumerate(changes):
        if index not in lost:
            disk.apply(change)
        elif change.kind == "write" and len(change.values[2]) > PAGE_BYTES and draw.random() < 0.5:
            number, offset, encoded = change.values  # some of its pages are on the disk
            data = base64.b64decode(encoded)
            for start in range(0, len(data), PAGE_BYTES):
                if draw.random() < 0.5:
                    disk.write(number, offset + start, data[start : start + PAGE_BYTES])
    found = dict(disk.walk())
    return CrashState(
        {path: bytes(disk.content[number]) for path, number in found.items() if number in disk.content},
        [path for path, number in found.items() if number in disk.entries],
        [change.values[0] for change in changes if change.kind == "acknowledged"],
        f"after {count} changes, without {[f'{i}: {changes[i].kind} {str(changes[i].values)[:60]}' for i in sorted(lost)]}",
    )
