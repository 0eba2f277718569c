"""Ends the ranks of an attempt, and all processes that they have started."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ckpt.recovery.ranks import process_kill
from ckpt.recovery.ranks.rank_process import NO_DESCRIPTOR, RankProcess
from ckpt.storage.base.errors import CkptError

_STUCK_SECONDS = 60.0
"""How long a killed rank may take to end before this is an error."""


def stop_ranks(ranks: Sequence[RankProcess], mark: str, spared_sessions: Sequence[int] = ()) -> None:
    """End the ranks, and all processes with the mark of this agent in their environment. Raises CkptError if that fails.

    spared_sessions: those of fork servers, which have the mark because the ranks are forks of them.
    """
    process_kill.kill_sessions([rank.process.pid for rank in ranks], mark, spared_sessions)
    until = time.monotonic() + _STUCK_SECONDS
    for rank in ranks:
        while rank.process.poll() is None:
            if time.monotonic() > until:
                raise CkptError(
                    f"rank {rank.number}, process {rank.process.pid}, can't be ended: it hangs in the kernel; restart this host"
                )
            time.sleep(0.001)
        if rank.pidfd != NO_DESCRIPTOR:
            os.close(rank.pidfd)
        rank.heartbeat_page.close()
