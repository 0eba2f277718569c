"""Fail points: named points in the code at which a test can stop, kill or fail the process.

`CKPT_FAILPOINTS="save.pack.append=kill@3,save.commit=error"` kills the process with SIGKILL at the third pass of the first
point, and raises OSError(EIO) at the second point. Actions: kill, stop (SIGSTOP, like a host that hangs), error (EIO), full
(ENOSPC), sleep:0.5 (seconds). `@*` means every pass. Without active points, a point costs one test of an empty dict.
"""

from __future__ import annotations

import errno
import os
import signal
import time

from ckpt.storage.base.forks import fork_safe_lock

_active: dict[str, list[tuple[str, int | None]]] = {}
"""The actions of each active point, each with the number of its pass; None means every pass. Set by `set_failpoints` alone."""
_passes: dict[str, int] = {}
_lock = fork_safe_lock()
"""Guards `_passes`."""


def set_failpoints(spec: str) -> None:
    """Replace all active points by those of `spec`, in the syntax of the module docstring; "" deactivates all."""
    with _lock:
        _passes.clear()
    _active.clear()
    for item in filter(None, spec.split(",")):
        name, _, action = item.partition("=")
        action, _, at = action.partition("@")
        _active.setdefault(name.strip(), []).append((action.strip(), None if at == "*" else int(at or 1)))


def failpoint(name: str) -> None:
    """Run the actions of the point `name`; do nothing if it is not active."""
    if _active:
        _run_actions(name)


def _run_actions(name: str) -> None:
    with _lock:
        count = _passes[name] = _passes.get(name, 0) + 1
    for action, at in _active.get(name, ()):
        if at not in (None, count):
            continue
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "error":
            raise OSError(errno.EIO, f"injected at fail point {name}")
        elif action == "full":
            raise OSError(errno.ENOSPC, f"injected at fail point {name}")
        elif action.startswith("sleep:"):
            time.sleep(float(action[6:]))
        else:
            raise ValueError(f"fail point {name}: unknown action {action!r}; use kill, stop, error, full or sleep:SECONDS")


set_failpoints(os.environ.get("CKPT_FAILPOINTS", ""))
