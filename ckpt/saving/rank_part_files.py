"""The files by which the ranks of a group make one step: their names, and the listing of other ranks' files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from ckpt.format.pack import step_of_file
from ckpt.repository.attempt import Attempt
from ckpt.repository.file_names import COMMIT_FILE, STEPS_FOLDER, step_folder
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.store import Store

_PART_NAME = re.compile(
    r"(?P<rank>\d+)-(?P<generation>\d+)-(?P<serial>\d+)-(?P<number>\d+)-(?:(?P<digest>[0-9a-f]{32}|[0-9a-f]{64})\.arrow|failed\.json)"
)


class ListedPart(NamedTuple):
    """A file in the part folder of a step, as its name describes it."""

    name: str
    rank: int
    digest: str | None
    """xxh3-128 of the file, or its HMAC if the rank has a key. None for the report of a rank that failed."""


def signed_bytes(stem: str, table: bytes) -> bytes:
    """Return the bytes that the HMAC in a part's name covers: rank, attempt and step too, so that no other part matches."""
    return b"\n".join((stem.encode(), table))


def _part_folder(step: int) -> str:
    return f"{step_folder(step)}/part"


def part_stem(attempt: Attempt) -> str:
    """Return how the names of all files of a rank in this attempt begin."""
    return f"{_part_folder(attempt.step)}/{attempt.name}-{attempt.number}"


def list_parts(store: Store, attempt: Attempt) -> Iterator[ListedPart]:
    """Yield the parts and failure reports of this attempt in the store."""
    for entry in store.list(_part_folder(attempt.step)):
        found = _PART_NAME.fullmatch(entry.name.rpartition("/")[2])
        if found and (int(found["generation"]), int(found["number"])) == (attempt.generation, attempt.number):
            yield ListedPart(entry.name, int(found["rank"]), found["digest"])


def other_step_text(store: Store, attempt: Attempt, ranks: Collection[int]) -> str:
    """Return a text that names another, uncommitted step for which one of these ranks has written a part; "" if none."""
    newest: dict[int, tuple[int, int]] = {}
    with suppress(CkptError):  # the error to report is that these ranks are missing
        names = {entry.name for entry in store.list(STEPS_FOLDER)}
        for name in names:
            folder, _, file = name.partition("/part/")
            part = _PART_NAME.fullmatch(file)
            if part is None or int(part["generation"]) != attempt.generation or f"{folder}/{COMMIT_FILE}" in names:
                continue
            rank, step = int(part["rank"]), step_of_file(name)
            if rank in ranks and step != attempt.step:
                newest[rank] = max(newest.get(rank, (-1, -1)), (int(part["serial"]), step))
    return f" (rank {min(newest)} has written its part of step {newest[min(newest)][1]})" if newest else ""
