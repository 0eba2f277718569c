"""One save or load of one state on a device, in a process of its own: by ckpt's own choice, or by a fixed one.

`devices.py` runs this file. It prints "ready" after its preparations, waits for a line on its standard input, and then does the
work and prints its seconds.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from probes import drop_cache, files

import ckpt

ARRAYS = 32
WARM_UP_MIB = 64
"""A save of more than its staging memory, so that this memory is mapped."""


@dataclass(frozen=True, slots=True)
class FixedChoice:
    """A way to save or load that does not change while it is measured."""

    kind: Literal["page cache", "requests", "appends", "parts"]
    """What is fixed: the number of threads that read through the page cache, of requests at a time that bypass it or go over a
    network, of appends at a time, or of parts at a time of an upload to a bucket."""
    count: int
    nbytes: int = 0
    """The length of a request or part."""

    def __str__(self) -> str:
        return f"{self.count} {self.kind}" + (f" of {self.nbytes / 2**20:g} MiB" if self.nbytes else "")

    def apply(self) -> None:
        """Make this process use the choice."""
        if self.kind == "page cache":
            from ckpt.storage.local.directory import LocalStore

            LocalStore.parallel_reads = self.count  # type: ignore[assignment, method-assign]
        elif self.kind == "requests":
            from ckpt.block_io import tuned_read_threads
            from ckpt.storage.tuning.choice import Choice, ChoiceSpace

            only = Choice(self.count, self.nbytes)
            space = ChoiceSpace((self.count,), (self.nbytes,), only, only.bytes_in_flight)
            tuned_read_threads.DISK = tuned_read_threads.NETWORK = space
        elif self.kind == "appends":
            from ckpt.storage.base.store import Store
            from ckpt.storage.local.directory import LocalStore

            Store.parallel_appends = LocalStore.parallel_appends = self.count  # type: ignore[assignment, method-assign]
        else:
            from ckpt.storage.remote import multipart_writer, object_store

            multipart_writer.PART_BYTES = object_store.PART_BYTES = self.nbytes
            multipart_writer.CONCURRENCY = object_store.CONCURRENCY = self.count


@dataclass(frozen=True, slots=True)
class Work:
    """What the process does."""

    kind: Literal["prepare", "save", "load", "restore"]
    """`prepare` saves the step that the others load."""
    url: str
    mib: int
    is_cold: bool = False
    """Whether the files are dropped from the page cache before the work; otherwise they are read into it."""
    choice: FixedChoice | None = None
    """None: ckpt chooses."""
    groups: list[str] = field(default_factory=list)
    """Files of control groups, to which the process writes its number before the work."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(text: str) -> Work:
    fields = json.loads(text)
    choice = fields.pop("choice")
    return Work(**fields, choice=choice and FixedChoice(**choice))


def make_state(mib: int) -> dict[str, np.ndarray]:
    """Return arrays of random bits, which no codec makes smaller."""
    rng = np.random.default_rng(0)
    words = (mib << 20) // 8 // ARRAYS
    return {f"layer.{i}": rng.integers(0, 1 << 64, words, np.uint64) for i in range(ARRAYS)}


def blank_state(mib: int) -> dict[str, np.ndarray]:
    """Return arrays of the same shapes, whose memory is allocated."""
    return {f"layer.{i}": np.ones((mib << 20) // 8 // ARRAYS, np.uint64) for i in range(ARRAYS)}


def digest(state: dict[str, np.ndarray]) -> str:
    """Return a hash of all values."""
    found = xxhash.xxh3_128()
    for array in state.values():
        found.update(array.data)
    return found.hexdigest()


def warm_up(work: Work) -> None:
    """Save and load a state first, since the first save and load of a process import much."""
    url = f"{work.url}-warm-up"
    state = make_state(WARM_UP_MIB if work.kind == "save" and "://" not in url else 1)
    ckpt.save(state, url, codec="none")
    if work.kind == "restore":
        ckpt.Checkpointer(url).restore(state)
    elif work.kind == "load":
        ckpt.load(url, like=state)
    remove(url)


def begin(work: Work) -> float:
    """Wait until the parent lets the work begin, and return the time."""
    for file in work.groups:
        Path(file).write_text("0")
    print("ready", flush=True)
    sys.stdin.readline()
    return time.perf_counter()


def save(work: Work) -> float:
    state = make_state(work.mib)
    began = begin(work)
    ckpt.save(state, work.url, step=1, codec="none")
    seconds = time.perf_counter() - began
    if work.kind == "save":
        remove(work.url)
    return seconds


def load(work: Work) -> float:
    like = blank_state(work.mib)
    if "://" not in work.url:
        set_cached(Path(work.url), work.is_cold)
    run: Callable[[], object] = lambda: ckpt.load(work.url, like=like)  # noqa: E731
    if work.kind == "restore":
        checkpointer = ckpt.Checkpointer(work.url)
        run = lambda: checkpointer.restore(like)  # noqa: E731
    began = begin(work)
    run()
    seconds = time.perf_counter() - began
    if digest(like) != digest(make_state(work.mib)):
        raise AssertionError("the loaded values differ from the saved ones")
    return seconds


def set_cached(folder: Path, is_cold: bool) -> None:
    """Drop the files of a folder from the page cache, or read them into it."""
    if is_cold:
        drop_cache(folder)
        return
    for file in files(folder):
        with file.open("rb") as opened:
            while opened.read(8 << 20):
                pass


def remove(url: str) -> None:
    """Delete a repository."""
    if "://" not in url:
        shutil.rmtree(url)
        return
    store = ckpt.open(url).store
    store.delete([entry.name for entry in store.list()])


def main() -> None:
    """Do the work, and print its seconds."""
    work = from_json(sys.argv[1])
    if work.choice is not None:
        work.choice.apply()
    if work.kind != "prepare":
        warm_up(work)
    print(save(work) if work.kind in ("prepare", "save") else load(work))


if __name__ == "__main__":
    main()
