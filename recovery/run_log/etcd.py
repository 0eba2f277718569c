"""The run log in etcd, for agents on many hosts.

    /ckpt-run/<name>/log/<number, 12 digits>    an entry
    /ckpt-run/<name>/agents/<agent>             the report of an agent

If the job has a token, both are signed with it (entry_signatures.py), and unsigned values are ignored. So somebody who can
only write to etcd can end a run, but can't decide what it executes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence

from ckpt.aggregator.cluster.etcd import parse_etcd_url
from ckpt.aggregator.cluster.etcd_client import EtcdClient, EtcdItem
from ckpt.recovery.run_log.agent_name import holder_of, require_holder
from ckpt.recovery.run_log.base import Draft, LogEntry, RunLog, placeholder_entry, require_state_url
from ckpt.recovery.run_log.entry_schema import read_entry
from ckpt.recovery.run_log.entry_signatures import Signer, UntrustedValue, strip_signature
from ckpt.recovery.run_log.etcd_compaction import EtcdCompaction
from ckpt.storage.base.checked_decode import Malformed, read_json
from ckpt.storage.base.errors import Refused, Unavailable

log = logging.getLogger("ckpt.run")

_TIMEOUT_SECONDS = 1.0
"""How long a call waits. The ranks continue while etcd does not answer; only decisions are delayed."""

_REPORT_TRIES = 3
"""How often a report is tried, if another process changes its key in between. Only the removal of a lost agent does so."""

_PAGE_ENTRIES = 16
"""How many entries one call reads. An answer has at most 16 MiB, and the start of an attempt on 512 hosts about 0.1 MB."""


class EtcdRunLog(RunLog):
    """The log and the reports of a run at etcd://HOST:PORT,…/NAME. Raises InvalidArgument if the URL is malformed.

    token: the token of the job, the same for all agents; None: nothing is signed.
    read_only: without a token, signed entries and reports are read without a check, and a warning says so.
    """

    is_remote = True
    own_options = "its own --state and --run-dir"

    def __init__(self, url: str, token: str | None = None, read_only: bool = False) -> None:
        require_state_url(url)
        endpoints, name = parse_etcd_url(url)
        self._etcd = EtcdClient(endpoints, _TIMEOUT_SECONDS)
        self._prefix = f"/ckpt-run/{name}/"
        self._compaction = EtcdCompaction(self._etcd, self._prefix)
        self._signer = Signer(token)
        self._accepts_unchecked = read_only and not self._signer.has_token
        self._warned: set[str] = set()
        self._report_revisions: dict[str, int] = {}
        """The revision of the last report of each agent that was published through this object."""
        if not self._signer.has_token and not read_only and not self._etcd.is_loopback:
            self._warn_once(
                url, "anyone who can write to %s controls this run, as there is no token to sign its entries; "
                "give --token-file (or CKPT_TOKEN, CKPT_TOKEN_FILE) on all hosts"
            )  # fmt: skip

    def entries(self, after: int = 0) -> list[LogEntry]:
        folder = f"{self._prefix}log/"
        found = {item.key: item for item in self._etcd.range(folder, _entry_key(folder, after + 1), _PAGE_ENTRIES)}
        entries: list[LogEntry] = []
        refused = 0
        while (item := found.pop(_entry_key(folder, number := after + 1 + len(entries)), None)) is not None:
            try:
                entries.append(read_entry(number, self._trusted_value(item)))
            except UntrustedValue as error:
                refused += 1
                entries.append(placeholder_entry(number, f"{error}; find out who else writes to {item.key} in etcd"))
        for key in found:
            self._warn_once(key, "%s in etcd is not the next entry of the run log: it is ignored")
        if refused and not after and (refused == len(entries) or not self._signer.has_token):
            raise Refused(
                f"{folder} has the log of a job with another token ({refused} of {len(entries)} entries): give that token "
                "(--token-file, CKPT_TOKEN_FILE), or another NAME in --state"
            )
        return entries

    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        folder, now = f"{self._prefix}log/", time.time()
        puts = {
            (key := _entry_key(folder, after + 1 + i)): self._signer.sign(
                key, json.dumps([now, d.attempt, d.kind, d.text, d.facts]).encode()
            )
            for i, d in enumerate(drafts)
        }
        return self._etcd.put_new(puts)

    def reports(self) -> dict[str, dict[str, object]]:
        folder = f"{self._prefix}agents/"
        found = {}
        for item in self._etcd.range(folder):
            try:
                facts = read_json(self._trusted_value(item))
                if not isinstance(facts, dict):
                    raise Malformed(f"it is a {type(facts).__name__}")
                found[item.key.removeprefix(folder)] = facts
            except ValueError as error:  # UntrustedValue, Malformed
                self._warn_once(item.key, f"%s in etcd is not a report of an agent of this run ({error}): it is ignored")
        return found

    def publish_report(self, name: str, facts: Mapping[str, object], replaces: str = "") -> None:
        key = f"{self._prefix}agents/{name}"
        value = self._signer.sign(key, json.dumps(facts).encode())
        for _ in range(_REPORT_TRIES):
            revision = self._report_revisions.pop(name, None)
            if revision is None:
                item = self._etcd.get(key)
                require_holder(name, self._read_report(item), facts, replaces)
                revision = item.revision
            if written := self._etcd.replace(EtcdItem(key, b"", revision), value):
                self._report_revisions[name] = written
                return
        raise Unavailable(f"{key} in etcd changes again and again; find out who else writes to it")

    def remove_report(self, name: str, incarnation: str = "") -> None:
        key = f"{self._prefix}agents/{name}"
        if not incarnation:
            self._etcd.delete(key)
        elif holder_of(self._read_report(item := self._etcd.get(key))) == incarnation:
            self._etcd.delete_unchanged(item)

    def _read_report(self, item: EtcdItem) -> dict[str, object] | None:
        """Return the report in an item; None if there is none, or it is not of an agent of this run."""
        try:
            facts = read_json(self._trusted_value(item)) if item.revision else None
        except ValueError:  # UntrustedValue, Malformed
            return None
        return facts if isinstance(facts, dict) else None

    def compact(self, now: float) -> None:
        self._compaction.compact_if_due(now)

    def endpoints(self) -> list[tuple[str, int]]:
        return self._etcd.host_ports

    def close(self) -> None:
        pass  # there is no open connection

    def _trusted_value(self, item: EtcdItem) -> bytes:
        if not self._accepts_unchecked:
            return self._signer.verify(item.key, item.value)
        if (value := strip_signature(item.value)) != item.value:
            self._warn_once(
                self._prefix,
                "the signature of values in %s was not checked, as there is no token; set CKPT_TOKEN_FILE to check it",
            )
        return value

    def _warn_once(self, key: str, text: str) -> None:
        """Log a warning about a key, once for each key. text: a format with one %s for the key."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning(text, key)


def _entry_key(folder: str, number: int) -> str:
    return f"{folder}{number:012d}"
