"""A repository that is kept in several tiers, as one: a step is there if any tier has it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckpt.places import Places
from ckpt.records import CommitRecord
from ckpt.repository import Repository, commit_name
from ckpt.storage.errors import IntegrityError, NotFound, StoreError

log = logging.getLogger("ckpt")


class TieredRepository(Repository):
    """Repositories, the nearest first; the last is the one of record. For reading."""

    def __init__(self, places: Sequence[Repository]) -> None:
        super().__init__(Places([place.store for place in places]))
        self._places = tuple(places)

    @property
    def places(self) -> tuple[Repository, ...]:
        return self._places

    def check(self) -> None:
        self._places[-1].check()

    def record(self, step: int) -> CommitRecord:
        """The record of the last save of this step: after a roll-back a tier may have an earlier one, too.

        Raises NotFound only where every tier was asked: a tier that could not be read may have the step.
        """
        found: CommitRecord | None = None
        damage: IntegrityError | None = None
        unread: StoreError | None = None
        for place in self._places:
            try:
                record = place.record(step)
            except NotFound:
                continue
            except IntegrityError as error:
                damage = error
                log.error("bad copy in the tier %s: %s; the next tier is asked", place.url, error)
            except StoreError as error:
                if place is self._places[-1]:
                    raise
                unread = error
                log.warning("%s; the next tier is asked", error)
            else:
                if found is None or record.order > found.order:
                    found = record
        if found is None:
            raise damage or unread or NotFound(f"{self.url}/{commit_name(step)} is in no tier")
        return found
