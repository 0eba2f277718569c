"""`python recorded_run.py MOUNT LEFT_OUT ARGUMENTS`: ckpt-run with these arguments, which acknowledges each entry of its log.

LEFT_OUT: see `helpers.crash_states.leave_out`; "nothing" changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from helpers.crash_states import leave_out
from helpers.power_loss import acknowledge

from ckpt.recovery.run_log import sqlite
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.tools.run import main

MOUNT = sys.argv.pop(1)
leave_out(sys.argv.pop(1), sqlite)
_append = SqliteRunLog.append


def append(self: SqliteRunLog, after: int, drafts: Sequence[Draft]) -> bool:
    """Append entries, and acknowledge the last one."""
    is_appended = _append(self, after, drafts)
    if is_appended:
        acknowledge(MOUNT, after + len(drafts))
    return is_appended


SqliteRunLog.append = append  # type: ignore[method-assign]
main()
