"""The records of writer leases: `generations/<n>.json` names the holder of a generation, `generations/<n>-left-…` is the end
marker of a rank."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

from ckpt.format import json_records
from ckpt.groups.process_identity import ProcessIdentity
from ckpt.repository.repository import Repository
from ckpt.storage.base.checked_decode import decode
from ckpt.storage.base.errors import CkptError, NotFound

log = logging.getLogger("ckpt")


def generation_name(generation: int) -> str:
    """The name of the record of a generation."""
    return f"generations/{generation:08d}.json"


def list_lease_records(repo: Repository) -> list[str]:
    """The names of all records of leases, end markers included."""
    return [entry.name for entry in repo.store.list("generations")]


def newest_generation(repo: Repository) -> int:
    """The highest generation that has a record, 0 where there is none."""
    return max(_generation_numbers(list_lease_records(repo)), default=0)


def _generation_numbers(names: Iterable[str]) -> list[int]:
    found = (name.removeprefix("generations/").removesuffix(".json") for name in names)
    return [int(n) for n in found if n.isdigit()]


class EndMarker(NamedTuple):
    """Says that a rank has ended its saves."""

    generation: int
    group_number: int
    rank: int

    @property
    def name(self) -> str:
        return f"generations/{self.generation:08d}-left-{self.group_number}-{self.rank}.json"


def end_markers(names: Iterable[str]) -> list[EndMarker]:
    """The end markers among the names of records."""
    found = (re.fullmatch(r"generations/(\d+)-left-(\d+)-(\d+)\.json", name) for name in names)
    return [EndMarker(*map(int, marker.groups())) for marker in found if marker]


def obsolete_lease_records(repo: Repository) -> list[str]:
    """Records that nobody needs any more: all but those of the newest."""
    names = list_lease_records(repo)
    *old, newest = sorted(_generation_numbers(names)) or [0]
    return [*map(generation_name, old), *(marker.name for marker in end_markers(names) if marker.generation < newest)]


def lease_holder(repo: Repository, generation: int) -> ProcessIdentity | None:
    """Who holds a generation, None where it was released or its record does not say."""
    try:
        body = json_records.load(repo.store, "generation", generation_name(generation))
        return decode(ProcessIdentity, body["owner"]) if body["owner"] else None
    except NotFound:
        return None
    except (KeyError, ValueError, CkptError) as error:
        log.warning("%s: the claim of generation %d is not readable: %s", repo.url, generation, error)
        return None
