"""What a run found: plain data, kept as JSON, from which the table and the picture can be drawn again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

Samples = list[float]


@dataclass(slots=True)
class PeerResult:
    """One peer, in seconds, one sample for each round after the warm-up."""

    nbytes: int
    stall_seconds: Samples
    """Until the call returned."""
    copy_seconds: Samples
    """A copy of the same state by two threads, just before each save; zero where the peer can't save in the background."""
    durable_seconds: Samples
    """Until everything was written and fsynced."""
    cold_seconds: Samples
    hot_seconds: Samples
    stored_bytes: int
    save_memory_bytes: int
    """The peak above the state, over all saves of the process, the first included."""
    load_memory_bytes: int
    step_ratios: Samples
    """Training step while a save runs over a quiet one; empty where the peer can't save in the background."""

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
    """Lazy staging: what the training loop waits for, in `save` and in the optimizer's next step()."""

    nbytes: int
    step_seconds: float
    save_seconds: Samples
    wait_seconds: Samples

    @property
    def stall_ms(self) -> float:
        return median(a + b for a, b in zip(self.save_seconds, self.wait_seconds, strict=True)) * 1e3


@dataclass(slots=True)
class Results:
    """One run."""

    machine: str
    began: str
    versions: dict[str, str]
    gib: float
    leaves: int
    repeat: int
    limits: dict[str, Samples] = field(default_factory=dict)
    """GB/s by name; the samples from before and after our own rows together."""
    peers: dict[str, PeerResult] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Why a row is not there."""
    lazy: LazyResult | None = None
    import_seconds: Samples = field(default_factory=list)

    def limit(self, name: str) -> float | None:
        """The median of a limit in GB/s, None where it was not measured."""
        samples = self.limits.get(name)
        return median(samples) if samples else None

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read(file: Path) -> Results:
    """The counterpart of `Results.write`."""
    found = Results(**json.loads(file.read_text()))
    found.peers = {key: PeerResult(**value) for key, value in found.peers.items()}  # type: ignore[arg-type]
    if found.lazy is not None:
        found.lazy = LazyResult(**found.lazy)  # type: ignore[arg-type]
    return found
