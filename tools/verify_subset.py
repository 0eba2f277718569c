"""Chooses and checks a part of the stored blocks, the next one each time, for `ckpt-inspect --verify --subset`.

Blocks are read in the order of their positions in the packs. A block is read once, even if many steps refer to it. The last
block is noted in a file of the user, because the repository may be read-only. Without that file, the part begins at a random
block. So a host that loses its files also reads all blocks in the long run.
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

from ckpt.block_io.step_verification import find_bad_blocks
from ckpt.format.manifest import Row
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import CkptError, IntegrityError
from ckpt.storage.base.store import ByteProgress


class Percent(click.ParamType):  # type: ignore[type-arg]
    """The type of an option with a share in percent, such as 5%."""

    name = "percent"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            share = float(str(value).strip().removesuffix("%")) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            self.fail(f"{value!r} is not a share of the blocks: use more than 0% and at most 100%, such as 5%.", param, ctx)
        return share


class PackPosition(NamedTuple):
    """Where a block is stored."""

    pack: str
    position: int


@dataclass(frozen=True, slots=True)
class ReferencedBlock:
    """A block, and the steps that refer to it."""

    row: Row
    algorithm: str
    steps: list[int] = field(default_factory=list)


Blocks = dict[PackPosition, ReferencedBlock]


def collect_blocks(checkpoints: Iterable[Checkpoint]) -> tuple[Blocks, dict[int, CkptError]]:
    """Return all blocks of these steps, and the errors of steps whose manifest or tree can't be used, by step."""
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
    """Return the blocks after a position, and then from the first on, until they have a share of the stored bytes.

    At least one block is chosen, and none twice. This is a pure function.

    after: the last block of the previous part, which need not exist any more; None for a start at the first block.
    share: from 0 to 1.
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
    repo: Repository, blocks: Blocks, chosen: Sequence[PackPosition], advance: ByteProgress
) -> dict[int, list[IntegrityError]]:
    """Read and check the chosen blocks; return the errors of damaged blocks, by each step that refers to them."""
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
    """A file of this user with the last block that was read of a repository, or of one step of it."""

    def __init__(self, repo: Repository, step: int | None) -> None:
        self._repository = repo.identity()
        name = hashlib.sha256(json.dumps([repo.url, step]).encode()).hexdigest()[:32]
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        # A user without an entry in the list of users, as in a container, has no home folder.
        self.file = None if state.startswith("~") else Path(state) / "ckpt" / "verified" / f"{name}.json"

    def last(self) -> PackPosition | None:
        """Return the last block; None if it is unknown, or of an earlier repository at this URL."""
        if self.file is None:
            return None
        try:
            record = json.loads(self.file.read_text())
            if record["repository"] != self._repository:
                return None
            return PackPosition(str(record["pack"]), int(record["position"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, pack_position: PackPosition) -> None:
        """Store the last block that was read. Raises OSError if the file can't be written."""
        if self.file is None:
            raise FileNotFoundError("this user has no home folder")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"repository": self._repository, **pack_position._asdict()}))
        temporary.replace(self.file)


def random_position(blocks: Blocks) -> PackPosition | None:
    """Return a random block; None if there are none."""
    return random.SystemRandom().choice(list(blocks)) if blocks else None
