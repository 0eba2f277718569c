"""The best way to read each device, as earlier processes of this user found it, in a small file that may be lost.

`shared_tuner` begins with what the file has, and `remember` writes what the tuner has found since. A file that can't be read
counts as empty, and a choice that this version does not have is ignored. Several processes may write at the same time. The file
is always complete, and contains what the last of them wrote.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ckpt.storage.base.forks import call_in_forked_child, fork_safe_lock
from ckpt.storage.tuning.choice import Choice, ChoiceSpace
from ckpt.storage.tuning.measured_reads import Tuner
from ckpt.storage.tuning.request_search import start

CACHE_DIR_VARIABLE = "CKPT_CACHE_DIR"
"""The environment variable with the folder of the file. An empty value means that nothing is read or written."""

_FILE_NAME = "devices.json"
_VERSION = 1
_MAX_DEVICES = 100
_MAX_FILE_BYTES = 1 << 20
_LAST_TIME = 1 << 40
"""In seconds since 1970. A later time counts as unknown, as does a value that is not a number."""

_lock = fork_safe_lock()
"""Guards `_tuners` and `_written`."""
_file_lock = fork_safe_lock()
"""Taken while the file is changed, so that this process writes the choices of two devices one after the other."""
_tuners: dict[str, Tuner] = {}
_written: dict[str, Choice] = {}


def cache_folder() -> Path | None:
    """Return the folder for what ckpt learns; None if CKPT_CACHE_DIR is empty, or if this user has no home folder."""
    folder = os.environ.get(CACHE_DIR_VARIABLE)
    if folder is not None:
        return Path(folder) if folder else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt"
    except RuntimeError:
        return None


def shared_tuner(device: str, space: ChoiceSpace) -> Tuner:
    """Return the tuner of a device, the same object for each call in this process.

    device: its name in the file. Stores of the same device share the tuner.
    """
    with _lock:
        if (tuner := _tuners.get(device)) is None:
            learned = _read_choices().get(device)
            tuner = _tuners[device] = Tuner(start(space, learned))
            if learned is not None:
                _written[device] = learned
        return tuner


def remember(device: str) -> None:
    """Write what the search for a device has found, if it is new. Raises no error."""
    with _lock:
        tuner = _tuners.get(device)
        if tuner is None or not tuner.search.is_resting or tuner.search.best == _written.get(device):
            return
        folder = cache_folder()
        if folder is None:
            return
        best = _written[device] = tuner.search.best
    with _file_lock, suppress(OSError):
        _write(folder, {**_read_devices(folder), device: _to_json(best)})


def forget_tuners() -> None:
    """Forget the searches of this process, as a new process would. For tests and benchmarks."""
    with _lock:
        _tuners.clear()
        _written.clear()


def _after_fork() -> None:
    """In a forked child: forget the tuners, because the threads whose requests they count do not exist."""
    _tuners.clear()
    _written.clear()


call_in_forked_child(_after_fork)


def _read_choices() -> dict[str, Choice]:
    folder = cache_folder()
    found = {device: _from_json(fields) for device, fields in (_read_devices(folder) if folder else {}).items()}
    return {device: choice for device, choice in found.items() if choice is not None}


def _read_devices(folder: Path) -> dict[str, dict[str, object]]:
    """Return the entries of the file by device; an empty dict if it can't be read, or has another version."""
    try:
        with (folder / _FILE_NAME).open("rb") as file:
            content = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    devices = content.get("devices") if isinstance(content, dict) and content.get("version") == _VERSION else None
    return {k: v for k, v in devices.items() if isinstance(v, dict)} if isinstance(devices, dict) else {}


def _write(folder: Path, devices: Mapping[str, Mapping[str, object]]) -> None:
    newest = sorted(devices.items(), key=lambda entry: _learned_at(entry[1]))[-_MAX_DEVICES:]
    text = json.dumps({"version": _VERSION, "devices": dict(newest)}, indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=folder, prefix=f".{_FILE_NAME}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(folder / _FILE_NAME)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


def _learned_at(fields: Mapping[str, object]) -> float:
    found = fields.get("learned_at")
    return found if isinstance(found, int | float) and 0 < found < _LAST_TIME else 0.0


def _to_json(choice: Choice) -> dict[str, object]:
    return {"requests": choice.requests, "request_bytes": choice.request_bytes, "learned_at": int(time.time())}


def _from_json(fields: Mapping[str, object]) -> Choice | None:
    requests, request_bytes = fields.get("requests"), fields.get("request_bytes")
    if not isinstance(requests, int) or not isinstance(request_bytes, int):
        return None
    return Choice(requests, request_bytes)
