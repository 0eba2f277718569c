"""What to do about a loss that went wrong: try the same batches again, pass over them, or give up. Pure.

The first time it may have been the hardware, and the same batches are tried again. At the second time at the same place it
is the data, or the state that was saved just before: an earlier step is taken, and the batches there are passed over, more
of them each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt.training import loss_spikes
from ckpt.training.data_position import SKIP_VARIABLE, Ranges, format_ranges, merge_ranges
from ckpt.training.heartbeat_page import RESTORE_LIMIT_VARIABLE, BadLoss

MAX_SKIPS = 3
"""So often batches are passed over at one place, and then it is the program, or its learning rate, that must be mended."""

_SAME_PLACE_BATCHES = 32
"""Bad losses that are no more than so many batches apart are at the same place: passing some over moves it."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """What is done, and why."""

    action: Literal["retry", "skip", "halt"]
    reason: str
    skip: Ranges = ()
    """All batches to pass over from now on, those of earlier roll-backs too."""
    before: int | None = None
    """Restore a step below this one, if there is any. Until an attempt has committed this one, or a later one, anew."""
    limit: float | None = None
    """What loss is too much until the ranks have seen enough to judge for themselves."""


def rollback_environment(skip: Ranges, before: int | None, limit: float | None) -> dict[str, str]:
    """How a rank is told to pass over batches, to restore a step below one, and what loss is too much."""
    variables = {}
    if skip:
        variables[SKIP_VARIABLE] = format_ranges(skip)
    if before is not None:
        variables[RESTORE_LIMIT_VARIABLE] = str(before)
    if limit is not None:
        variables[loss_spikes.LIMIT_VARIABLE] = repr(limit)
    return variables


def roll_back(history: Sequence[BadLoss], skip: Ranges = ()) -> RollBack:
    """What to do after the last of these losses. history: of each attempt that a bad loss has ended, in their order.
    skip: what is passed over already."""
    last = history[-1]
    times = sum(abs(_batch_number(bad) - _batch_number(last)) <= _SAME_PLACE_BATCHES for bad in history)
    what = _describe_loss(last)
    limit = last.limit if last.kind == "spike" else None
    if times == 1:
        return RollBack("retry", f"{what}; the same batches are tried again", skip, None, limit)
    if times > MAX_SKIPS + 1:
        reason = (
            f"{what}; the {_ordinal(times)} time there, and batches {format_ranges(skip)} were passed over: look at the "
            "losses in "
            "the ranks' logs, in the folder of the run"
        )
        return RollBack("halt", reason, skip)
    # The batch before may have spoiled the weights with a loss that was still good.
    reach = 4 ** (times - 2)
    first, end = max(0, _batch_number(last) - reach), _batch_number(last) + reach - 1
    now = merge_ranges([*skip, (first, end)])
    reason = f"{what}; the {_ordinal(times)} time there: batches {first} to {end} are passed over"
    return RollBack("skip", reason, now, max(0, last.step - reach), limit)


def _batch_number(bad: BadLoss) -> int:
    """The number of a batch; the step, where a loop takes its data from elsewhere."""
    return bad.batch if bad.batch >= 0 else bad.step


def _describe_loss(bad: BadLoss) -> str:
    where = f"of step {bad.step}" + (f" (batch {bad.batch})" if bad.batch >= 0 else "")
    if bad.kind == "spike":
        return f"the loss {where} jumped to {bad.loss:g}, above {bad.limit:g}"
    return f"the loss {where} was {bad.loss:g}"


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")
