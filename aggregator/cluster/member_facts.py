"""What members say of themselves: where they stand, if the configuration does not say it, and which device each of them is."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.cluster.open_member import OpenMember
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.member.device import MemberInfo


class MemberFacts:
    """The members are asked once, and those that do not answer again when they do. Safe to use from many threads."""

    def __init__(self, fan_out: FanOut) -> None:
        self._fan_out = fan_out
        self._requests: dict[str, Future[MemberInfo]] = {}
        self._infos: dict[str, MemberInfo] = {}
        self._lock = threading.Lock()

    def get_infos(
        self, open_members: Mapping[str, OpenMember], timeout_seconds: float, wait_for_all: bool = False
    ) -> Mapping[str, MemberInfo]:
        """What those say that have answered by now. Who was not asked before, or everyone, is waited for, but no longer than
        this; who has not answered then, while others have, is left alone."""
        if len(self._infos) >= len(open_members) and all(name in self._infos for name in open_members):
            return self._infos
        with self._lock:
            new = []
            for name, open_member in open_members.items():
                asked = self._requests.get(name)
                failed = asked is not None and asked.done() and asked.exception() is not None
                if name in self._infos or (asked is not None and not failed) or (failed and self._fan_out.health.is_down(name)):
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
    """The failure domains of members: as configured, or else as they say. One that is only told apart by its own name (`near=`)
    stands within what it says; one that has not said it yet stands alone.
    """
    found = {
        name: (*domain_of_labels(infos.get(name)), *domain) if domain in ((), (name,)) else domain
        for name, domain in configured.items()
    }
    depth = max((len(domain) for domain in found.values()), default=0)
    has_labels = any(info.labels for info in infos.values())
    return {name: domain or ((name,) * depth if has_labels else ()) for name, domain in found.items()}


def domain_of_labels(info: MemberInfo | None) -> tuple[str, ...]:
    """The failure domains that a member says it stands in."""
    return () if info is None else tuple(value for _, value in info.labels)


def require_distinct_devices(infos: Mapping[str, MemberInfo], names: Iterable[str], url: str) -> None:
    """Raises InvalidArgument where two members are the same device: what is kept twice would be lost at once."""
    by_device: dict[str, str] = {}
    for name in names:
        info = infos.get(name)
        other = name if info is None else by_device.setdefault(info.identity, name)
        if other != name:
            raise InvalidArgument(f"{url}: {other} and {name} are the same device; name it once")
