"""The reports of members about themselves: their failure domains and their devices."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.cluster.open_member import OpenMember
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.member.device import MemberInfo


class MemberFacts:
    """The reports of members, each requested until it was received once. Safe to use from many threads."""

    def __init__(self, fan_out: FanOut) -> None:
        self._fan_out = fan_out
        self._requests: dict[str, Future[MemberInfo]] = {}
        self._infos: dict[str, MemberInfo] = {}
        self._lock = threading.Lock()
        """Guards `_requests`. Guards changes of `_infos`."""

    def get_infos(
        self, open_members: Mapping[str, OpenMember], timeout_seconds: float, wait_for_all: bool = False
    ) -> Mapping[str, MemberInfo]:
        """Return the reports received so far, by member.

        Waits up to `timeout_seconds` for the members that are asked for the first time, or for all (`wait_for_all`). A member
        that has not answered by then counts as down if others have answered.
        """
        if len(self._infos) >= len(open_members) and all(name in self._infos for name in open_members):
            return self._infos
        with self._lock:
            new = []
            for name, open_member in open_members.items():
                request = self._requests.get(name)
                failed = request is not None and request.done() and request.exception() is not None
                is_pending = request is not None and not failed
                if name in self._infos or is_pending or (failed and self._fan_out.health.is_down(name)):
                    continue
                self._requests[name] = self._fan_out.submit(name, open_member.info)
                new.append(name)
            waiting = {self._requests[name]: name for name in (open_members if wait_for_all else new) if name in self._requests}
        done_now, unanswered = wait(waiting, timeout_seconds)
        if timeout_seconds and done_now:
            for future in unanswered:
                self._fan_out.health.record_failure(waiting[future], f"no answer within {timeout_seconds:g} s")
        with self._lock:
            done = {n: f.result() for n, f in self._requests.items() if f.done() and f.exception() is None}
            if len(done) > len(self._infos):
                self._infos = done
            return self._infos


def failure_domains(configured: Mapping[str, tuple[str, ...]], infos: Mapping[str, MemberInfo]) -> dict[str, tuple[str, ...]]:
    """Return the failure domains of members, as configured or else as they report.

    A member whose configured domain is only its own name (`near=`) lies within the domains that it reports. A member that has
    not reported yet is a domain of its own, once any other has reported.
    """
    found = {
        name: (*domain_of_labels(infos.get(name)), *domain) if domain in ((), (name,)) else domain
        for name, domain in configured.items()
    }
    depth = max((len(domain) for domain in found.values()), default=0)
    has_labels = any(info.labels for info in infos.values())
    return {name: domain or ((name,) * depth if has_labels else ()) for name, domain in found.items()}


def domain_of_labels(info: MemberInfo | None) -> tuple[str, ...]:
    """Return the failure domains that a member reports, the widest first."""
    return () if info is None else tuple(value for _, value in info.labels)


def require_distinct_devices(infos: Mapping[str, MemberInfo], names: Iterable[str], url: str) -> None:
    """Raise InvalidArgument if two members are the same device: both copies of a file would be lost at once."""
    by_device: dict[str, str] = {}
    for name in names:
        info = infos.get(name)
        other = name if info is None else by_device.setdefault(info.identity, name)
        if other != name:
            raise InvalidArgument(f"{url}: {other} and {name} are the same device; name it once")
