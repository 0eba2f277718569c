"""End a command that is interrupted during its imports at once, with one line and no traceback.

The package is imported before the code of a command runs, so it imports this module first. In a program that is not a command
of ckpt, the module changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

STATUS = 128 + signal.SIGINT
"""The exit status of an interrupted command."""

_COMMANDS = {
    "ckpt.tools.inspect": "ckpt-inspect", "ckpt.tools.restore": "ckpt-restore", "ckpt.tools.import_step": "ckpt-import",
    "ckpt.tools.node": "ckpt-node", "ckpt.tools.mount": "ckpt-mount", "ckpt.tools.run": "ckpt-run",
}  # fmt: skip
"""The commands by their modules, as pyproject.toml lists them."""


def _command() -> str:
    """Return the command that this process runs, as `ckpt-run` or `python -m ckpt.tools.run`; "" for another program."""
    name = os.path.basename(next(iter(getattr(sys, "argv", [])), "")).removesuffix(".exe")
    if name == "-m":
        name = next((_COMMANDS[argument] for argument in sys.orig_argv if argument in _COMMANDS), "")
    return name if name in _COMMANDS.values() and threading.current_thread() is threading.main_thread() else ""


_pending = False
"""Whether an interrupt has raised KeyboardInterrupt. Set by the signal handler, in the main thread."""

_COMMAND_NAME = _command()
"""Determined during the imports, since a command may change sys.argv later."""


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, f"\n{_COMMAND_NAME}: interrupted\n".encode())
    finally:
        os._exit(STATUS)  # not an exception, which an import of native code may swallow


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    global _pending
    _pending = True
    raise KeyboardInterrupt


def as_exceptions() -> None:
    """Make interrupts raise KeyboardInterrupt again; a command calls it before it does anything that it must clean up."""
    if signal.getsignal(signal.SIGINT) is _exit_at_once:
        signal.signal(signal.SIGINT, _raise_interrupt)


def check() -> None:
    """Raise KeyboardInterrupt if an earlier one was lost: Python only prints an exception that is raised in a finalizer."""
    if _pending:
        raise KeyboardInterrupt


if _COMMAND_NAME and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored, as by nohup
    signal.signal(signal.SIGINT, _exit_at_once)
