"""Attempt, one try of a rank to save a step, and how attempts are numbered so that no file name is used twice."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.repository.lease_records import newest_generation
from ckpt.repository.repository import Repository


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of one rank to save one step."""

    name: str
    """<rank>-<generation>-<serial>. The names of its files begin with it, and it is never used twice."""
    rank: int
    generation: int
    step: int
    number: int
    """The number of earlier attempts of this rank at this step in this generation. It is the same on all ranks, also after a
    failure on one of them, so the committer finds by it which parts belong together."""

    @property
    def serial(self) -> tuple[int, int]:
        """Generation and serial, which grow with each attempt of this rank."""
        return self.generation, int(self.name.rpartition("-")[2])

    def has_file(self, file: str) -> bool:
        """Return whether a file of the repository belongs to this attempt.

        The name of another attempt may begin with the name of this one.
        """
        return file.rpartition("/")[2].startswith((f"{self.name}-", f"{self.name}."))


class SerialCounter:
    """Serials and group numbers that the leases of several repositories (tiers) share.

    A file that is copied from one tier to another keeps its name, so the name must be new in all of them. A copied commit
    record keeps its generation and attempt number, so no other attempt at the step may have both.
    """

    def __init__(self, repos: Sequence[Repository] = ()) -> None:
        self._repos = repos
        self.serials = itertools.count()
        self.group_numbers = itertools.count()

    @functools.cached_property
    def highest_generation(self) -> int:
        """The highest generation of all these repositories."""
        return max(map(newest_generation, self._repos), default=0)


@dataclass(frozen=True, slots=True)
class AttemptSeries:
    """Attempts that are numbered together for each step: those of a group, or those of a process alone."""

    group: int | None
    """The number of the group; None for saves of this process alone."""
    rank: int
    first_number: int
    """The number of the first attempt at a step."""
    first_serial: int
    """Is added to each serial."""
