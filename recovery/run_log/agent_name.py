"""The name of an agent, which one agent holds at a time: the newest report of that name is of the holder.

An agent takes a name that is free, or that was of an agent that is lost. From then on it replaces its own reports only. An
agent that was stopped for so long that another one has taken its name finds that out with its next report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from ckpt.storage.base.errors import CkptError


class NameTaken(CkptError):
    """Another agent holds the name. report: the facts of its newest report."""

    def __init__(self, name: str, report: Mapping[str, object]) -> None:
        holder = _describe_holder(report)
        super().__init__(f"an agent called {name} runs already ({holder}); end it, or give this host another --name")


def name_lost_error(name: str, report: Mapping[str, object]) -> CkptError:
    """Return the error of an agent that had the name before, and whose reports did not arrive for a while.

    report: the facts of the newest report of the agent that has the name now.
    """
    return CkptError(
        f"another agent took the name {name} while this one was silent ({_describe_holder(report)}); this one ends; "
        "if both are needed, give one of them another --name"
    )


def holder_of(report: Mapping[str, object] | None) -> str:
    """Return the random name of the process that a report is of; "" if there is no report, or it does not have one."""
    found = None if report is None else report.get("incarnation")
    return found if isinstance(found, str) else ""


def require_holder(name: str, stored: Mapping[str, object] | None, report: Mapping[str, object], replaces: str) -> None:
    """Raise NameTaken if a stored report is of another agent than a new one.

    stored: the stored report of this name; None if there is none.
    report: the new one.
    replaces: the lost agent whose report may be replaced; "" none.
    """
    holder = holder_of(stored)
    if stored is not None and holder and holder not in (holder_of(report), replaces):
        raise NameTaken(name, stored)


def _describe_holder(report: Mapping[str, object]) -> str:
    joined = report.get("joined")
    since = time.strftime("%b %d %H:%M:%S", time.localtime(joined)) if isinstance(joined, float) else "an unknown time"
    return f"process {report.get('pid')} at {report.get('address')}, since {since}"
