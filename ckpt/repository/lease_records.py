"""Reads the records of writer leases: the holder of each generation, and the end markers of ranks.

`generations/<n>.json` names the holder of a generation, and `generations/<n>-left-…` is the end marker of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.format import json_records
from ckpt.groups.process_identity import ProcessIdentity
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import NotFound


def generation_name(generation: int) -> str:
    """Return the name of the record of a generation."""
    return f"generations/{generation:08d}.json"


def list_lease_records(repo: Repository) -> list[str]:
    """Return the names of all records of leases, including end markers."""
    return [entry.name for entry in repo.store.list("generations")]


def newest_generation(repo: Repository) -> int:
    """Return the highest generation that has a record, or 0."""
    return max(_generation_numbers(list_lease_records(repo)), default=0)


def _generation_numbers(names: Iterable[str]) -> list[int]:
    found = (name.removeprefix("generations/").removesuffix(".json") for name in names)
    return [int(n) for n in found if n.isdigit()]


class EndMarker(NamedTuple):
    """A record that a rank has ended its saves."""

    generation: int
    group_number: int
    rank: int

    @property
    def name(self) -> str:
        """The name of the record."""
        return f"generations/{self.generation:08d}-left-{self.group_number}-{self.rank}.json"


def end_markers(names: Iterable[str]) -> list[EndMarker]:
    """Return the end markers among the names of records."""
    found = (re.fullmatch(r"generations/(\d+)-left-(\d+)-(\d+)\.json", name) for name in names)
    return [EndMarker(*map(int, marker.groups())) for marker in found if marker]


def obsolete_lease_records(repo: Repository) -> list[str]:
    """Return the names of the records that are not needed any more: those of all generations but the newest."""
    names = list_lease_records(repo)
    *old, newest = sorted(_generation_numbers(names)) or [0]
    return [*map(generation_name, old), *(marker.name for marker in end_markers(names) if marker.generation < newest)]


@dataclass(frozen=True, slots=True)
class _LeaseRecord:
    """The fields that the record of a generation must have."""

    owner: ProcessIdentity | None


def lease_holder(repo: Repository, generation: int) -> ProcessIdentity | None:
    """Return the holder of a generation; None if it was released or its record is missing.

    Raises IntegrityError for a damaged record, FormatError for one of a newer version, and StoreError if it can't be read now:
    its holder may live.
    """
    name = generation_name(generation)
    try:
        body = json_records.load(repo.store, "generation", name)
    except NotFound:
        return None
    return json_records.parse_body(_LeaseRecord, body, f"{repo.url}/{name}").owner
