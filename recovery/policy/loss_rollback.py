"""The decision after a bad loss: try the same batches again, skip them, or halt. Pure.

The first time, the hardware may be the cause, so the same batches are tried again. The second time at the same batches, the
cause is the data or the state saved just before. So an earlier step is restored and these batches are skipped, more of them
each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt.training import loss_spikes
from ckpt.training.batch_order import SKIP_VARIABLE, Ranges, format_ranges, merge_ranges
from ckpt.training.heartbeat_records import BadLoss
from ckpt.training.restore_step_limit import RESTORE_STEP_LIMIT_VARIABLE

MAX_SKIPS = 3
"""How often batches are skipped at one place. After that the program or its learning rate is at fault."""

_SAME_PLACE_BATCHES = 32
"""Bad losses at most this many batches from each other are at the same place: skipped batches move the loss."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """The next action after a bad loss, and why."""

    action: Literal["retry", "skip", "halt"]
    reason: str
    skip: Ranges = ()
    """All batches to skip from now on, with those of earlier roll-backs."""
    restore_step_limit: int | None = None
    """Restore a step below this one if there is one, until an attempt has committed this step or a later one again."""
    loss_limit: float | None = None
    """The loss above which a rank reports a bad loss, until it has seen enough losses to judge by itself."""


def rollback_environment(skip: Ranges, restore_step_limit: int | None, loss_limit: float | None) -> dict[str, str]:
    """Return the environment variables that make a rank skip batches, limit the step to restore and limit the loss."""
    variables = {}
    if skip:
        variables[SKIP_VARIABLE] = format_ranges(skip)
    if restore_step_limit is not None:
        variables[RESTORE_STEP_LIMIT_VARIABLE] = str(restore_step_limit)
    if loss_limit is not None:
        variables[loss_spikes.LIMIT_VARIABLE] = repr(loss_limit)
    return variables


def roll_back(history: Sequence[BadLoss], skip: Ranges = ()) -> RollBack:
    """Return what to do after the last of these losses.

    history: the bad losses that ended attempts, one per attempt, the oldest first.
    skip: the batches that are already skipped.
    """
    last = history[-1]
    times = sum(abs(_batch_number(bad) - _batch_number(last)) <= _SAME_PLACE_BATCHES for bad in history)
    what = _describe_loss(last)
    loss_limit = last.limit if last.kind == "spike" else None
    if times == 1:
        return RollBack("retry", f"{what}; the same batches are tried again", skip, None, loss_limit)
    if times > MAX_SKIPS + 1:
        reason = (
            f"{what}; the {_ordinal(times)} time there, and batches {format_ranges(skip)} were skipped: look at the "
            "losses in the ranks' logs, in the folder of the run"
        )
        return RollBack("halt", reason, skip)
    # The batch before may have damaged the weights although its own loss was good.
    reach = 4 ** (times - 2)
    first, end = max(0, _batch_number(last) - reach), _batch_number(last) + reach - 1
    now = merge_ranges([*skip, (first, end)])
    reason = f"{what}; the {_ordinal(times)} time there: batches {first} to {end} are skipped"
    return RollBack("skip", reason, now, max(0, last.step - reach), loss_limit)


def _batch_number(bad: BadLoss) -> int:
    """Return the number of the batch; the step if the loop does not read its data by `ckpt.data`."""
    return bad.batch if bad.batch >= 0 else bad.step


def _describe_loss(bad: BadLoss) -> str:
    where = f"of step {bad.step}" + (f" (batch {bad.batch})" if bad.batch >= 0 else "")
    if bad.kind == "spike":
        return f"the loss {where} jumped to {bad.loss:g}, above {bad.limit:g}"
    return f"the loss {where} was {bad.loss:g}"


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")
