"""The newest report of each agent of a host, as files `agents/<name>.json` in the folder of the run.

Reports are not part of the SQLite file of the log. They need not be durable, and a connection that writes without fsync may
also checkpoint the write-ahead log without fsync. A power cut then loses entries that other connections have made durable
(https://sqlite.org/pragma.html#pragma_synchronous, synchronous=OFF).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from ckpt.recovery.run_log.agent_name import holder_of
from ckpt.storage.base.checked_decode import Malformed, read_json
from ckpt.storage.base.errors import Unavailable

REPORTS_FOLDER = "agents"
_REPORT_BYTES = 16 << 20
"""The longest report. A longer one is ignored."""


class ReportFiles:
    """The report files of a run. Each call is safe from several threads and processes. An agent writes only its own file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / REPORTS_FOLDER
        self._lock = threading.Lock()
        """Taken while a report is written: two threads of an agent write the same temporary file."""

    def read(self) -> dict[str, dict[str, object]]:
        """Return the newest report of each agent, by its name. A file that a power cut has damaged is left out."""
        found: dict[str, dict[str, object]] = {}
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.suffix == ".json")
        except FileNotFoundError:  # no agent has written a report
            return {}
        except OSError as error:
            raise self._unavailable("read", error) from error
        for path in paths:
            name = path.name.removesuffix(".json")
            if (facts := self.read_one(name)) is not None:
                found[name] = facts
        return found

    def read_one(self, name: str) -> dict[str, object] | None:
        """Return the newest report of an agent; None if there is none, or a power cut has damaged it."""
        return self._read_file(f"{name}.json")

    def _read_file(self, file_name: str) -> dict[str, object] | None:
        try:
            facts = read_json(_read_report(self._folder / file_name))
        except (FileNotFoundError, Malformed):
            return None
        except OSError as error:
            raise self._unavailable("read", error) from error
        return facts if isinstance(facts, dict) else None

    def write(self, name: str, facts: Mapping[str, object]) -> None:
        """Replace the report of an agent."""
        path = self._folder / f"{name}.json"
        temporary = self._folder / f".{name}.{os.getpid()}"
        try:
            with self._lock:
                self._folder.mkdir(exist_ok=True)
                temporary.write_text(json.dumps(facts))
                os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise self._unavailable("written", error) from error

    def remove(self, name: str, incarnation: str = "") -> None:
        """Remove the report of an agent that has ended, if it is of this agent; "": of any."""
        if incarnation and holder_of(self.read_one(name)) != incarnation:
            return
        path = self._folder / f"{name}.json"
        taken = f".{name}.{os.getpid()}.removed"
        try:
            with self._lock:
                path.rename(self._folder / taken)  # a replacement of the agent may have written another one by now
                if incarnation and holder_of(self._read_file(taken)) != incarnation:
                    with contextlib.suppress(FileExistsError):  # the replacement has written its next one
                        os.link(self._folder / taken, path)
                (self._folder / taken).unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unavailable("removed", error) from error

    def _unavailable(self, what: str, error: OSError) -> Unavailable:
        return Unavailable(
            f"the reports in {self._folder} can't be {what} now: {error.strerror}; free space on this disk, check it and its "
            "permissions, or give another --run-dir"
        )


def _read_report(path: Path) -> bytes:
    """Return the bytes of a report. Raises Malformed if it is too long."""
    with path.open("rb") as file:
        data = file.read(_REPORT_BYTES + 1)
    if len(data) > _REPORT_BYTES:
        raise Malformed(f"{path} is longer than {_REPORT_BYTES} bytes")
    return data
