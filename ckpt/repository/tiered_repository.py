"""Several tiers as one repository for reading: a step exists if any tier has it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckpt.block_io.replicated_store import ReplicatedStore
from ckpt.format.json_records import CommitRecord
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import CkptError, IntegrityError, NotFound, StoreError

log = logging.getLogger("ckpt")


class TieredRepository(Repository):
    """The union of several repositories, for reading."""

    def __init__(self, repositories: Sequence[Repository]) -> None:
        """repositories: the nearest first; the last is the repository of record."""
        self._replicated_store = ReplicatedStore([tier.store for tier in repositories])
        super().__init__(self._replicated_store, repositories[-1].keys)
        self._repositories = tuple(repositories)

    @property
    def tiers(self) -> tuple[Repository, ...]:
        return self._repositories

    def take_listing_failures(self) -> dict[str, StoreError]:
        """Return why tiers could not be listed since the last call, by URL; their steps are missing in a listing."""
        return self._replicated_store.take_listing_failures()

    def check(self) -> None:
        self._repositories[-1].check()

    def record(self, step: int) -> CommitRecord:
        """Return the commit record of the last save of this step; after a roll-back a tier may still have an earlier save.

        Raises NotFound or IntegrityError only if no tier failed: a tier that could not be read may have the step. Raises the
        error of such a tier, too, if it has a step of this number, which after a roll-back may be the later one.
        """
        found: CommitRecord | None = None
        damage: IntegrityError | None = None
        store_failure: StoreError | None = None
        unread: list[Repository] = []
        for tier in self._repositories:
            try:
                record = tier.record(step)
            except NotFound:
                continue
            except IntegrityError as error:
                damage = error
                log.error("bad copy in the tier %s: %s; reading the next tier", tier.url, error)
            except StoreError as error:
                if tier is self._repositories[-1]:
                    raise
                store_failure = error
                unread.append(tier)
                log.warning("%s; reading the next tier", error)
            else:
                if found is None or record.save_order > found.save_order:
                    found = record
        if found is None:
            raise store_failure or damage or NotFound(f"{self.url}/{commit_name(step)} is in no tier")
        if store_failure is not None and self.line_numbers() and any(_is_listed(step, tier) for tier in unread):
            raise store_failure
        return found

    def training_line_of(self, step: int) -> int:
        """Return the number of the training line of a step; 0 if there is no such step, or if its record can't be read."""
        try:
            return self.record(step).line if step >= 0 and self.line_numbers() else 0
        except CkptError as error:
            log.warning("the training line of step %d is unknown: %s", step, error)
            return 0


def _is_listed(step: int, tier: Repository) -> bool:
    """Return whether a tier has a folder for a step; False if it can't be listed: then it may be lost with its host."""
    try:
        return step in tier.step_numbers()
    except StoreError:
        return False
