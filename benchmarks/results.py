"""The results of a run as plain data, stored as JSON, from which tables and plots can be made again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

Samples = list[float]


@dataclass(slots=True)
class PeerResult:
    """The results of one peer. Samples are in seconds, one for each round."""

    nbytes: int
    """The bytes of the state."""
    stall_seconds: Samples
    """The time until the call of the save returned."""
    copy_seconds: Samples
    """The time of a copy of the state by two threads, just before each save; zero for a peer without background saves."""
    durable_seconds: Samples
    """The time until everything was durable."""
    cold_seconds: Samples
    """The time of a load from the disk."""
    hot_seconds: Samples
    """The time of a load from the page cache."""
    stored_bytes: int
    save_memory_bytes: int
    """The peak of memory above the state, over all saves including the warm-up, and with a process that saves."""
    load_memory_bytes: int
    step_ratios: Samples
    """The time of a training step during a save over that of a quiet one; empty for a peer without background saves."""

    def add_round(self, other: PeerResult) -> None:
        """Add the samples of another round."""
        for name in ("stall_seconds", "copy_seconds", "durable_seconds", "cold_seconds", "hot_seconds", "step_ratios"):
            getattr(self, name).extend(getattr(other, name))
        self.save_memory_bytes = max(self.save_memory_bytes, other.save_memory_bytes)
        self.load_memory_bytes = max(self.load_memory_bytes, other.load_memory_bytes)

    @property
    def gb(self) -> float:
        return self.nbytes / 1e9

    @property
    def stall_ms(self) -> float:
        return median(self.stall_seconds) * 1e3

    @property
    def copy_ms(self) -> float:
        return median(self.copy_seconds) * 1e3

    @property
    def durable_gbs(self) -> float:
        return self.gb / median(self.durable_seconds)

    @property
    def cold_gbs(self) -> float:
        return self.gb / median(self.cold_seconds)

    @property
    def hot_gbs(self) -> float:
        return self.gb / median(self.hot_seconds)

    @property
    def step_ratio(self) -> float | None:
        return median(self.step_ratios) if self.step_ratios else None


@dataclass(slots=True)
class LazyResult:
    """Lazy staging: the time for which the training loop waits, in `save` and in the next step() of the optimizer."""

    nbytes: int
    step_seconds: float
    save_seconds: Samples
    wait_seconds: Samples

    @property
    def stall_ms(self) -> float:
        return median(a + b for a, b in zip(self.save_seconds, self.wait_seconds, strict=True)) * 1e3


@dataclass(slots=True)
class Results:
    """The results of one run."""

    machine: str
    began: str
    versions: dict[str, str]
    gib: float
    leaves: int
    repeat: int
    limits: dict[str, Samples] = field(default_factory=dict)
    """Samples in GB/s, by name, one for each round."""
    peers: dict[str, PeerResult] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """The reason why a row is missing, by peer."""
    lazy: LazyResult | None = None
    import_seconds: Samples = field(default_factory=list)

    def limit(self, name: str) -> float | None:
        """Return the median of a limit in GB/s, or None if it was not measured."""
        samples = self.limits.get(name)
        return median(samples) if samples else None

    def write(self, file: Path) -> None:
        """Write the results to a JSON file."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read(file: Path) -> Results:
    """Return the results that `Results.write` wrote."""
    found = Results(**json.loads(file.read_text()))
    found.peers = {key: PeerResult(**value) for key, value in found.peers.items()}  # type: ignore[arg-type]
    if found.lazy is not None:
        found.lazy = LazyResult(**found.lazy)  # type: ignore[arg-type]
    return found
