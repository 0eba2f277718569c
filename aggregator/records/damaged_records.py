"""The replacement of damaged records by the value that the other members have accepted."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.storage.base.plural import format_count
from ckpt.storage.registers.base import (
    REGISTERS_INCOMPLETE,
    Ballot,
    DamagedRegister,
    RegisterAnswer,
    Registers,
    RegisterValue,
)

log = logging.getLogger("ckpt")

_SECONDS = 5.0
"""How long to wait for members to replace their damaged records; a slower one continues in the background."""


def replace_damaged(
    registers: Mapping[str, Registers],
    fan_out: FanOut,
    values: Mapping[str, RegisterValue],
    promises: Mapping[str, Mapping[str, RegisterAnswer]],
    ballot: Ballot,
    fence_number: int,
) -> dict[str, set[str]]:
    """Replace damaged records, by one call of each member that has any; return by path the members that accepted its value.

    values: by path, the value that a read quorum of the other members has accepted after it had promised the ballot.
    promises: the answers of the members to the ballot, by path and member.
    """
    damaged: dict[str, dict[str, DamagedRegister]] = defaultdict(dict)
    replaced: dict[str, set[str]] = defaultdict(set)
    for path in values:
        for member, answer in promises[path].items():
            if isinstance(answer, DamagedRegister):
                damaged[member][path] = answer

    def accept_on(member: str) -> Callable[[], list[bool]]:
        new = [(path, values[path]) for path in damaged[member]]
        return lambda: registers[member].accept(new, ballot, repair_damaged=True, fence_number=fence_number)

    if not damaged:
        return replaced
    answers, errors = fan_out.ask({m: accept_on(m) for m in damaged}, _SECONDS, skip_failed=True, mark_late=False)
    for member, accepted in answers.items():
        for (path, answer), is_accepted in zip(damaged[member].items(), accepted, strict=True):
            if not is_accepted:
                continue
            replaced[path].add(member)
            if answer == REGISTERS_INCOMPLETE:  # at INFO, because an empty disk causes one message for each file
                log.info("%s had no record of %s (its registers are new), and has one again", member, path)
            else:
                log.warning("the record of %s on %s was damaged (%s) and is restored", path, member, answer.reason)
    for member, error in errors.items():
        log.info("%s on %s could not be restored yet: %s", format_count(len(damaged[member]), "damaged record"), member, error)
    return replaced
