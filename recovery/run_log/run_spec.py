"""`RunSpec`, the command and the options of a run, and `AttemptHost`, a host of one attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The command of a run and its options, the same on all hosts."""

    command: tuple[str, ...]
    ranks: int
    """The number of ranks on each host."""
    hosts: int = 1
    """The number of hosts of an attempt, if there are enough."""
    least: int = 1
    """The fewest hosts of an attempt."""
    restarts: int = 10
    """The most restarts in a row without a newer committed step."""
    grace_seconds: float = 30.0
    """The time that ranks have to save and end after a signal."""
    patience_seconds: float = 30.0
    """How long the run waits for a replacement of a lost host before it continues with fewer hosts."""
    give_up_seconds: float = 600.0
    """How long the run waits for `least` hosts before it ends."""
    spares: int = 0
    """How many more hosts are expected to wait."""
    straggler: float = 0.0
    """A host is left out if a rank of it takes this many times as long as the median and a spare waits; 0 never."""
    straggler_seconds: float = 60.0
    """How long a rank must be slow to be a straggler."""
    directory: str = ""
    """The repository that the ranks use if they name none."""


@dataclass(frozen=True, slots=True)
class AttemptHost:
    """A host that takes part in an attempt."""

    name: str
    incarnation: str
    first: int
    """Its first rank. Its other ranks have the numbers that follow."""
    count: int
