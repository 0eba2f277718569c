"""Signals that ask `ckpt-mount` to end: it unmounts its folder, and ends once nothing there is open any more.

The handlers of libfuse set a flag and expect that its main thread is interrupted. The kernel may give the signal to any other
thread, and then nothing happens until the next request. Python's handler writes to a pipe, in whatever thread it runs.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

log = logging.getLogger("ckpt.mount")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def unmount_on_signals(folder: Path) -> None:
    """Unmount at the first signal, end this process at the second. Signals that are ignored, as by nohup, stay ignored."""
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # libfuse leaves a handler that is there
    threading.Thread(target=_unmount_on_signal, args=(receiver, folder), name="ckpt-unmount", daemon=True).start()


def _unmount_on_signal(receiver: int, folder: Path) -> None:
    first = _read_signal(receiver)
    if (error := _try_unmount(folder, "-u")) is not None:
        if _try_unmount(folder, "-uz") is not None:  # it is not mounted yet
            os._exit(128 + first)
        log.warning(
            "%s is still in use (%s): it is detached, and this process ends when the last of its files is closed. Another "
            "signal ends it at once; what was not synced is lost then", folder, error,
        )  # fmt: skip
    os._exit(128 + _read_signal(receiver))


def _read_signal(receiver: int) -> int:
    """The number of the next of the signals that end this process."""
    while (number := os.read(receiver, 1)[0]) not in _SIGNALS:
        pass
    return number


def _try_unmount(folder: Path, option: str) -> str | None:
    """Unmount; the reason where that failed."""
    program = shutil.which("fusermount3") or shutil.which("fusermount") or "fusermount3"
    try:
        done = subprocess.run([program, option, str(folder)], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{program}: {error.strerror}"
    return None if done.returncode == 0 else " ".join(done.stderr.split())
