"""`UserMessages`, the messages that an agent prints: important entries of the log, and errors of the run log."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

from ckpt.recovery.policy.failure import describe_failure
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS, HostFailure
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_facts import EndFacts, facts_of
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.storage.base.errors import StoreError


def leave_seconds(spec: RunSpec) -> float:
    """Return how long an agent waits for a decision of the leader after a signal has asked it to end."""
    return spec.grace_seconds + 2 * LOST_SECONDS


class UserMessages:
    """Prints each message once. The main thread owns it."""

    def __init__(self, print_line: Callable[[str], None], spec: RunSpec) -> None:
        self._print_line, self._spec = print_line, spec
        self._last_text = ""
        self._printed_stop_attempt = -1
        self._log_error = self._pending_text = ""

    def print(self, text: str) -> None:
        """Print a message for the user."""
        with contextlib.suppress(OSError):  # the terminal is gone or the disk is full; the agent continues without the message
            self._print_line(text)

    def print_entry(self, entry: LogEntry) -> None:
        """Print an entry of the log if the user should know it at once."""
        was_given_up = entry.kind == "end" and facts_of(entry, EndFacts).status == 1 and entry.text != self._last_text
        is_remark = entry.kind == "note" and entry.facts
        if entry.kind == "stop" and self._printed_stop_attempt != entry.attempt:
            self._printed_stop_attempt = entry.attempt
            self.print(f"{entry.text}: the ranks save and end, within {self._spec.grace_seconds:g} s")
        elif (
            entry.kind == "decision" or was_given_up or is_remark
            or (self._spec.hosts > 1 and entry.kind in ("lead", "start"))
        ):  # fmt: skip
            self.print(entry.text)
        self._last_text = entry.text

    def print_log_error(self, error: StoreError, pending: str) -> None:
        """Print that the run log does not answer. The ranks continue, and only decisions are delayed.

        pending: a text about what has to wait for it; "" nothing.
        """
        if not self._log_error:
            self.print(f"{error}. The ranks continue; their failures are handled when the run log answers")
        self._log_error = str(error)
        before, self._pending_text = self._pending_text, pending
        if pending and pending != before:
            self.print(pending)

    def forget_log_error(self) -> None:
        """Forget the last error, because the run log has answered."""
        self._log_error = self._pending_text = ""


def describe_pending(end_signal: int, failure: HostFailure | None, have_ended: bool, spec: RunSpec) -> str:
    """Return a text about the event on this host that has to wait for the run log; "" if there is none. Pure.

    end_signal: the signal by which this agent was requested to end; 0 none.
    failure: the failure of the ranks of this host.
    have_ended: whether the ranks of this host have ended.
    """
    if end_signal:
        name = signal.Signals(end_signal).name
        return f"{name}: without the run log the ranks can't be asked to save; they are ended within {leave_seconds(spec):g} s"
    if failure is not None:
        return f"{describe_failure(failure.ranks, failure.detail)}; what is done about it is decided when the run log answers"
    if have_ended:
        return "all ranks of this host have ended with success; the run ends when the run log answers, or by another signal"
    return ""
