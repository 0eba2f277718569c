"""The records of training lines in the store of a repository, and the lines of its steps as far as they are known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ckpt.errors import damage_text
from ckpt.format import json_records
from ckpt.format.training_lines import Ancestry, StepOrder, TrainingLine, parse_line
from ckpt.storage.base.errors import AlreadyExists, CkptError, IntegrityError, is_damage
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _LineRecord:
    """The fields of a record in `lines/`."""

    line: int
    left: Ancestry


def _line_record_name(number: int) -> str:
    return f"lines/{number:08}.json"


def line_numbers(store: Store) -> list[int]:
    """Return the numbers of all training lines but the first, ascending; empty if no run has gone back to an older step."""
    names = (entry.name.removeprefix("lines/").removesuffix(".json") for entry in store.list("lines"))
    return sorted(int(name) for name in names if name.isdecimal())


def write_line(store: Store, line: TrainingLine) -> None:
    """Write the record of a training line, if it has none."""
    data = json_records.encode("line", {"line": line.number, "left": line.ancestry})
    with suppress(AlreadyExists):
        store.put_new(_line_record_name(line.number), data)


def newest_opened_line(store: Store) -> TrainingLine:
    """Return the newest line that was opened, whether or not a step on it is committed.

    A line with a damaged record counts as that of another run. Raises StoreError if the record can't be read now, and
    FormatError if a newer version has written it.
    """
    number = max(line_numbers(store), default=0)
    if not number:
        return TrainingLine()
    name = _line_record_name(number)
    where = f"{store.url}/{name}"
    try:
        record = json_records.parse_body(_LineRecord, json_records.load(store, "line", name), where)
        if record.line != number:
            raise IntegrityError(damage_text(where, f"it is the record of line {record.line}"))
        return parse_line(record.line, record.left)
    except (CkptError, ValueError) as error:
        if isinstance(error, CkptError) and not is_damage(error):
            raise
        log.warning("the history of training line %d of %s is unknown: %s", number, store.url, error)
        return TrainingLine(number)


@dataclass(frozen=True, slots=True)
class StepLines:
    """The training lines of the committed steps of a repository."""

    known: dict[int, TrainingLine]
    errors: dict[int, CkptError]
    """The error of each step whose record can't be read."""
    order: StepOrder
    """The order of the steps of both."""

    def newest(self, is_accepted: Callable[[int], bool] = lambda step: True) -> int | None:
        """Return the newest step with a known line for which `is_accepted` is true; None if there is none.

        A damaged step is left out. Raises the error of a step that can't be read now and may be newer.
        """
        for step in filter(is_accepted, reversed(self.order.steps)):
            if step in self.known:
                return step
            if not is_damage(self.errors[step]):
                raise self.errors[step]
        return None
