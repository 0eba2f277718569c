"""Handles signals that end `ckpt-mount`: it unmounts its folder, and ends when no file of it is open any more.

The handlers of libfuse set a flag, and expect that the signal interrupts its main thread. But the kernel may deliver the signal
to another thread, and then nothing happens until the next request. The handler of Python writes to a pipe in any thread.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import threading
from pathlib import Path

from ckpt.recovery.ranks.signals import END_SIGNALS

log = logging.getLogger("ckpt.mount")

_SECONDS_TO_END = 5.0
"""A process whose mount is gone everywhere ends within milliseconds; after these seconds it logs why it does not."""


def unmount_on_signals(folder: Path) -> None:
    """Unmount at the first signal, and end this process at the second. Ignored signals (nohup) stay ignored.

    A SIGHUP is not a second signal: if a terminal is closed, its shell and the kernel may each send one.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # libfuse does not replace an existing handler
    threading.Thread(target=_unmount_on_signal, args=(receiver, folder), name="ckpt-unmount", daemon=True).start()


def _unmount_on_signal(receiver: int, folder: Path) -> None:
    first = _read_signal(receiver)
    if (error := _try_unmount(folder, "-u")) is not None:
        if _try_unmount(folder, "-uz") is not None:
            if os.path.ismount(folder):
                log.error("%s stays mounted (%s): install fuse3, and run `umount -l` on the folder", folder, error)
            os._exit(128 + first)
        log.warning(
            "%s is still in use (%s): it is detached, and this process ends when its last file is closed. Another signal ends "
            "it at once, and loses writes that were not synced", folder, error,
        )  # fmt: skip
    elif not select.select([receiver], [], [], _SECONDS_TO_END)[0]:
        log.warning(
            "%s is unmounted, but another mount namespace, such as that of a container, still has it: this process serves that "
            "until it ends. Another signal ends this process at once", folder,
        )  # fmt: skip
    while (second := _read_signal(receiver)) == signal.SIGHUP:
        pass
    os._exit(128 + second)


def _read_signal(receiver: int) -> int:
    """Wait for the next signal that ends this process, and return its number."""
    while (number := os.read(receiver, 1)[0]) not in END_SIGNALS:
        pass
    return number


def _try_unmount(folder: Path, option: str) -> str | None:
    """Unmount the folder; return the reason if that failed, otherwise None."""
    program = shutil.which("fusermount3") or shutil.which("fusermount") or "fusermount3"
    try:
        done = subprocess.run([program, option, str(folder)], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{program}: {error.strerror}"
    return None if done.returncode == 0 else " ".join(done.stderr.split())
