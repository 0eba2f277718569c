"""What is to be run, and on which hosts an attempt runs: the same for all who read the log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What is to be run, and how: the same on all hosts."""

    command: tuple[str, ...]
    ranks: int
    """On each host."""
    hosts: int = 1
    least: int = 1
    """It goes on with so many hosts, where there are no more."""
    restarts: int = 10
    """In a row, without a newer step."""
    grace_seconds: float = 30.0
    """From a signal to the end: time to save."""
    patience_seconds: float = 30.0
    """How long it waits for a host in place of a lost one, before it goes on with fewer."""
    give_up_seconds: float = 600.0
    """How long it waits for as many hosts as it can't do without."""
    spares: int = 0
    """So many more hosts are expected to wait."""
    straggler: float = 0.0
    """A host with a rank that takes so many times as long as the median is left out, where a spare waits; 0 never."""
    straggler_seconds: float = 60.0
    """How long a rank must be slow."""
    directory: str = ""
    """The repository that the ranks use, where they name none."""


@dataclass(frozen=True, slots=True)
class AttemptHost:
    """A host that takes part in an attempt."""

    name: str
    incarnation: str
    first: int
    """Its first rank; the others follow."""
    count: int
