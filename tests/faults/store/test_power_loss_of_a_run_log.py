"""After a power loss at any moment, the run log has each acknowledged entry, and takes the next one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.crash_states import CrashState
from helpers.mounts import why_no_fuse
from helpers.power_loss import AMOUNT, first_wrong, record

import ckpt
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.sqlite import SqliteRunLog

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")

RUN = "runs/today/run"

TWO_AGENTS = f"""
import sys
from pathlib import Path
from ckpt.recovery.run_log import sqlite
from ckpt.recovery.run_log.base import Draft
from helpers.crash_states import leave_out
from helpers.power_loss import acknowledge

mount, left_out = sys.argv[1:]
leave_out(left_out, sqlite)
number = 0
for session in range(3):
    agents = [sqlite.SqliteRunLog(Path(mount, "{RUN}")) for _ in range(2)]
    for beat, count in enumerate((1, 3, 1, 2)):
        agent = agents[beat % 2]
        drafts = [Draft(session, "note", str(number + 1 + i), {{"long": "x" * 3000 * i}}) for i in range(count)]
        assert agent.append(number, drafts)
        number += count
        acknowledge(mount, number)
        agent.publish_report(f"host{{beat % 2}}", {{"beat": beat, "long": "y" * 5000}})
    agents[0].remove_report("host1")
    if session == 1:
        continue  # the agents of the next session find the write-ahead log of killed ones
    for agent in agents:
        agent.close()
"""
"""Two agents of one host append entries and publish reports, in three sessions."""

LENGTHS = [1, 4, 5, 7, 8, 11, 12, 14, 15, 18, 19, 21]
"""The numbers of entries after each append."""


def wrong_in_run_log(state: CrashState, folder: Path) -> str | None:
    """Return what is wrong in a state, None if the log has all acknowledged entries, no part of an append, and takes more."""
    acknowledged = int(state.acknowledged[-1]) if state.acknowledged else 0
    allowed = {acknowledged, next((length for length in LENGTHS if length > acknowledged), acknowledged)}
    try:
        if acknowledged and (wrong := wrong_in_entries(folder / RUN, allowed, read_only=True)):
            return wrong
        return wrong_in_entries(folder / RUN, allowed, read_only=False)
    except ckpt.CkptError as error:
        return f"the log can't be used: {error}"


def wrong_in_entries(run: Path, allowed: set[int], read_only: bool) -> str | None:
    """Return what is wrong with the entries and reports of a run, which must have one of these numbers of entries."""
    with contextlib.closing(SqliteRunLog(run, read_only)) as run_log:
        texts = [entry.text for entry in run_log.entries()]
        if texts != [str(number) for number in range(1, len(texts) + 1)] or len(texts) not in allowed:
            return f"{texts} are the entries, read only: {read_only}"
        if any(set(facts["long"]) != {"y"} or len(facts["long"]) != 5000 for facts in run_log.reports().values()):
            return "a report is not whole, and is read"
        if read_only:
            return None
        run_log.publish_report("host0", {"beat": 100})
        if not run_log.append(len(texts), [Draft(3, "note", "next")]) or run_log.entries()[-1].text != "next":
            return "the next entry is not appended"
        return None if run_log.reports()["host0"] == {"beat": 100} else "the next report is not found"


@pytest.mark.soak
def test_acknowledged_entries_survive_a_power_loss_at_any_moment(tmp_path: Path, count_cases: CountCases) -> None:
    assert first_wrong(record(tmp_path, TWO_AGENTS), wrong_in_run_log, *AMOUNT, count_cases=count_cases) is None


@pytest.mark.parametrize("left_out", ["synchronous=NORMAL", "synchronous=OFF", "make_durable_root"])
def test_a_missing_fsync_of_the_run_log_is_found(tmp_path: Path, left_out: str) -> None:
    """Else the test above could not fail."""
    assert first_wrong(record(tmp_path, TWO_AGENTS, left_out), wrong_in_run_log, 1) is not None
