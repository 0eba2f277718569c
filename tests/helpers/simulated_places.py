"""The memories of a tier simulation, and its repository of record, which is a folder or a bucket."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from obstore.store import MemoryStore

from ckpt.storage.base.store import Store
from ckpt.storage.local.directory import LocalStore
from helpers.faulty_stores import Faults, FaultyBucket, open_faulty
from helpers.interleaving import Interleaving
from helpers.stepped_stores import PlainBucket


class Places:
    """Where one run has its steps. A path names each of them, also the bucket."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.memory, self.record = folder / "memory", folder / "run"
        self._bucket = MemoryStore() if random.Random(f"kind of the record of {seed}").random() < 0.3 else None
        self.record_url = str(self.record) if self._bucket is None else f"memory://{folder.name}"

    def all(self) -> list[Path]:
        """Return the tiers in all memories, and the repository of record."""
        return [*(tier for memory in self.memory.glob("*") for tier in memory.iterdir()), self.record]

    def plain_store(self, place: Path) -> Store:
        """Return the store of a place, without steps and faults."""
        if place == self.record and self._bucket is not None:
            return PlainBucket(self.record_url, self._bucket)
        return LocalStore(place, direct=False)

    def of_url(self, url: str) -> Path:
        """Return the place that has this URL."""
        return self.record if url == self.record_url else Path(urlsplit(url).path)

    def open(self, url: Any, faults: Faults, interleaving: Interleaving) -> Store:
        """Return the store of a URL, each of whose operations is a step."""
        if self._bucket is not None and url == self.record_url:
            return FaultyBucket(url, self._bucket, faults, interleaving)
        return open_faulty(self.of_url(str(url)), faults, interleaving)
