"""A part of the stored blocks of several steps, another one each time: what `ckpt-inspect --verify --subset` reads.

Blocks are taken in the order in which they lie, each once, whatever the number of steps that refer to it. The last block
that was read is remembered in a file of the user, for a repository that is inspected may be read-only. Where nothing is
remembered the part begins at random: so a host that forgets its files reads all blocks in the end, too.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import click

from ckpt.block_io.block_reader import find_bad_blocks
from ckpt.format.manifest import Row
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import CkptError, IntegrityError
from ckpt.tools.common import Advance


class Percent(click.ParamType):  # type: ignore[type-arg]
    """A share of something, as in 5%."""

    name = "percent"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            share = float(str(value).strip().removesuffix("%")) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            self.fail(f"{value!r} is no share of the blocks: use a number from above 0% to 100%, as in 5%.", param, ctx)
        return share


class PackPosition(NamedTuple):
    """Where a block lies."""

    pack: str
    position: int


@dataclass(slots=True)
class ReferencedBlock:
    """A block, and the steps that refer to it."""

    row: Row
    algorithm: str
    steps: list[int] = field(default_factory=list)


Blocks = dict[PackPosition, ReferencedBlock]


def collect_blocks(checkpoints: Iterable[Checkpoint]) -> tuple[Blocks, dict[int, CkptError]]:
    """All blocks of these steps, and what is wrong with the steps whose manifest or tree can't be used."""
    found: Blocks = {}
    failed: dict[int, CkptError] = {}
    for checkpoint in checkpoints:
        try:
            checkpoint.require_complete()
            manifest = checkpoint.manifest()
            rows = manifest.by_block()
        except CkptError as error:
            failed[checkpoint.step] = error
            continue
        for row in rows:
            pack_position = PackPosition(row.pack or "", row.position)
            found.setdefault(pack_position, ReferencedBlock(row, manifest.digest_algorithm)).steps.append(checkpoint.step)
    return found, failed


def choose_part(blocks: Blocks, after: PackPosition | None, share: float) -> list[PackPosition]:
    """The blocks that come after one, and then the first ones again, until they are so large a share of the stored bytes. Pure.

    At least one block, and none twice. after: need not exist any more.
    """
    order = sorted(blocks)
    begin = 0 if after is None else bisect.bisect_right(order, after)
    most = share * sum(stored.row.stored for stored in blocks.values())
    chosen: list[PackPosition] = []
    nbytes = 0
    for pack_position in (*order[begin:], *order[:begin]):
        if chosen and nbytes >= most:
            break
        chosen.append(pack_position)
        nbytes += blocks[pack_position].row.stored
    return chosen


def verify_chosen(
    repo: Repository, blocks: Blocks, chosen: Sequence[PackPosition], advance: Advance
) -> dict[int, list[IntegrityError]]:
    """Read and check these blocks. By step, what is wrong with those that refer to a bad one."""
    by_algorithm: dict[str, list[Row]] = {}
    for pack_position in chosen:
        by_algorithm.setdefault(blocks[pack_position].algorithm, []).append(blocks[pack_position].row)
    failed: dict[int, list[IntegrityError]] = {}
    for algorithm, rows in by_algorithm.items():
        for row, error in find_bad_blocks(repo.store, algorithm, rows, repo.url, advance):
            for step in blocks[PackPosition(row.pack or "", row.position)].steps:
                failed.setdefault(step, []).append(error)
    return failed


class VerifyProgress:
    """The last block that was read of a repository, or of one step of it, in a file of this user."""

    def __init__(self, repo: Repository, step: int | None) -> None:
        self._repository = repo.identity()
        name = hashlib.sha256(json.dumps([repo.url, step]).encode()).hexdigest()[:32]
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
        self.file = Path(state) / "ckpt" / "verified" / f"{name}.json"

    def last(self) -> PackPosition | None:
        """None where nothing is known of this repository."""
        try:
            record = json.loads(self.file.read_text())
            if record["repository"] != self._repository:
                return None
            return PackPosition(str(record["pack"]), int(record["position"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, pack_position: PackPosition) -> None:
        """Raises OSError where the file can't be written."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"repository": self._repository, **pack_position._asdict()}))
        temporary.replace(self.file)


def random_position(blocks: Blocks) -> PackPosition | None:
    """One of the blocks; None where there are none."""
    return random.choice(list(blocks)) if blocks else None
