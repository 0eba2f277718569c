"""What the user of this host is told: entries of the log that matter at once, and what has to wait for the state."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

from ckpt.recovery.policy.decide import describe_failure
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS, HostFailure
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_facts import EndFacts, facts_of
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.storage.base.errors import StoreError


def leave_seconds(spec: RunSpec) -> float:
    """Seconds that an agent waits for who decides, once it was asked to end."""
    return spec.grace_seconds + 2 * LOST_SECONDS


class UserMessages:
    """Prints each thing once. Owned by the main thread."""

    def __init__(self, print_line: Callable[[str], None], spec: RunSpec) -> None:
        self._print_line, self._spec = print_line, spec
        self._last_text = ""
        self._printed_stop_attempt = -1
        self._state_error = self._pending_text = ""

    def print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone, a full disk: the log has it
            self._print_line(text)

    def print_entry(self, entry: LogEntry) -> None:
        """What the user should know at once."""
        given_up = entry.kind == "end" and facts_of(entry, EndFacts).status == 1 and entry.text != self._last_text
        remark = entry.kind == "note" and entry.facts
        if entry.kind == "stop" and self._printed_stop_attempt != entry.attempt:
            self._printed_stop_attempt = entry.attempt
            self.print(f"{entry.text}: the ranks save and end, within {self._spec.grace_seconds:g} s")
        elif entry.kind == "decision" or given_up or remark or (self._spec.hosts > 1 and entry.kind in ("lead", "start")):
            self.print(entry.text)
        self._last_text = entry.text

    def print_state_error(self, error: StoreError, pending: str) -> None:
        """The state does not answer: the ranks go on, and only what goes wrong meanwhile has to wait.

        pending: what that is, in words; "" nothing.
        """
        if not self._state_error:
            self.print(f"{error}. The ranks go on; what happens to them is dealt with when it answers again")
        self._state_error = str(error)
        before, self._pending_text = self._pending_text, pending
        if pending and pending != before:
            self.print(pending)

    def end_state_error(self) -> None:
        """The state has answered."""
        self._state_error = self._pending_text = ""


def describe_pending(end_signal: int, failure: HostFailure | None, have_ended: bool, spec: RunSpec) -> str:
    """What has come to pass, and has to wait for the state; "" nothing. Pure.

    end_signal: by which this agent was asked to end; 0 none. failure, have_ended: of the ranks of this host.
    """
    if end_signal:
        name = signal.Signals(end_signal).name
        return f"{name}: without the state the ranks can't be asked to save; they are ended within {leave_seconds(spec):g} s"
    if failure is not None:
        return f"{describe_failure(failure.ranks, failure.detail)}; what is done about it is decided when the state answers"
    if have_ended:
        return "all ranks of this host have ended well; the run ends when the state answers, or by another signal"
    return ""
