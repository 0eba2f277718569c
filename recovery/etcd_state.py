"""The state of a run in etcd, for agents on many hosts.

    /ckpt-run/<name>/log/<number, 12 digits>    an entry
    /ckpt-run/<name>/agents/<agent>             what an agent says of itself
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.aggregator.etcd import parse_url
from ckpt.aggregator.etcd_client import Etcd
from ckpt.recovery.state import Draft, Entry, State
from ckpt.storage.errors import InvalidArgument, StoreError

_SECONDS = 1.0
"""How long a call waits. The ranks go on without; only what is noticed meanwhile waits."""


class EtcdState(State):
    """etcd://HOST:PORT,…/NAME. Raises InvalidArgument where the URL is none."""

    remote = True

    def __init__(self, url: str) -> None:
        if not re.fullmatch(r"etcd://[^/]+/[\w.-]+", url):
            raise InvalidArgument(f"--state {url}: write etcd://HOST:PORT,…/NAME; without it a file in --run-dir is the state")
        endpoints, name = parse_url(url)
        self._etcd = Etcd(endpoints, _SECONDS)
        self._folder = f"/ckpt-run/{name}/"

    def entries(self, after: int = 0) -> list[Entry]:
        log = f"{self._folder}log/"
        found = self._etcd.range(log, _key(log, after + 1))
        try:
            return [_entry(int(item.key.removeprefix(log)), item.value) for item in found]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{log} in etcd holds what is no log of a run ({error!r}); give another name") from error

    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        log, now = f"{self._folder}log/", time.time()
        puts = {
            _key(log, after + 1 + i): json.dumps([now, d.attempt, d.kind, d.text, d.facts]).encode()
            for i, d in enumerate(drafts)
        }
        return self._etcd.put_new(puts)

    def reports(self) -> dict[str, dict[str, Any]]:
        folder = f"{self._folder}agents/"
        return {item.key.removeprefix(folder): json.loads(item.value) for item in self._etcd.range(folder)}

    def report(self, name: str, facts: Mapping[str, Any]) -> None:
        self._etcd.put(f"{self._folder}agents/{name}", json.dumps(facts).encode())

    def withdraw(self, name: str) -> None:
        self._etcd.delete(f"{self._folder}agents/{name}")

    def close(self) -> None:
        pass  # it holds no connection


def _key(log: str, number: int) -> str:
    return f"{log}{number:012d}"


def _entry(number: int, value: bytes) -> Entry:
    at, attempt, kind, text, facts = json.loads(value)
    return Entry(number, float(at), int(attempt), str(kind), str(text), dict(facts))
