"""A command that is interrupted while it still imports ends at once, with one line and no traceback.

The package is imported before a command has its first word, so this is what it imports first. Other programs are left alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

STATUS = 128 + signal.SIGINT


_COMMANDS = ("ckpt-inspect", "ckpt-restore", "ckpt-node", "ckpt-mount", "ckpt-run")


def _command() -> str:
    """The command that this process is: `ckpt-run`, or `python -m ckpt.tools.run`; "" for a program that imports ckpt."""
    name = os.path.basename(next(iter(getattr(sys, "argv", [])), "")).removesuffix(".exe")
    if name == "-m":
        module = next((word for word in sys.orig_argv if word.startswith("ckpt.tools.")), "")
        name = module.replace("ckpt.tools.", "ckpt-")
    return name if name in _COMMANDS and threading.current_thread() is threading.main_thread() else ""


_pending = False
_COMMAND_NAME = _command()
"""As long as it imports; later sys.argv says something else."""


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, f"\n{_COMMAND_NAME}: interrupted\n".encode())
    finally:
        os._exit(STATUS)  # not by an exception: an import in the middle of native code may swallow it


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    global _pending
    _pending = True
    raise KeyboardInterrupt


def as_exceptions() -> None:
    """From now on an interrupt is a KeyboardInterrupt again: there is something to be cleared away."""
    if signal.getsignal(signal.SIGINT) is _exit_at_once:
        signal.signal(signal.SIGINT, _raise_interrupt)


def check() -> None:
    """Raise KeyboardInterrupt where one came to nothing: what is raised while an object goes, Python only prints."""
    if _pending:
        raise KeyboardInterrupt


if _COMMAND_NAME and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as by nohup
    signal.signal(signal.SIGINT, _exit_at_once)
