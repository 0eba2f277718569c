"""What members say of themselves: where they stand, if the configuration does not say it, and which device each of them is."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait

from ckpt.aggregator.fanout import FanOut
from ckpt.aggregator.place import Place
from ckpt.storage.device import Info
from ckpt.storage.errors import InvalidArgument


class Told:
    """The members are asked once, and those that do not answer again when they do. Safe to use from many threads."""

    def __init__(self, fan_out: FanOut) -> None:
        self._fan_out = fan_out
        self._asked: dict[str, Future[Info]] = {}
        self._infos: dict[str, Info] = {}
        self._lock = threading.Lock()

    def ask(self, places: Mapping[str, Place], seconds: float, everyone: bool = False) -> Mapping[str, Info]:
        """What those say that have answered by now. Who was not asked before, or everyone, is waited for, but no longer than
        this; who has not answered then, while others have, is left alone."""
        if len(self._infos) >= len(places) and all(name in self._infos for name in places):
            return self._infos
        with self._lock:
            new = []
            for name, place in places.items():
                asked = self._asked.get(name)
                failed = asked is not None and asked.done() and asked.exception() is not None
                if name in self._infos or (asked is not None and not failed) or (failed and self._fan_out.health.down(name)):
                    continue
                self._asked[name] = self._fan_out.submit(name, place.info)
                new.append(name)
            waiting = {self._asked[name]: name for name in (places if everyone else new) if name in self._asked}
        done_now, late = wait(waiting, seconds)
        if seconds and done_now:
            for future in late:
                self._fan_out.health.failed(waiting[future], f"no answer within {seconds:g} s")
        with self._lock:
            done = {n: f.result() for n, f in self._asked.items() if f.done() and f.exception() is None}
            if len(done) > len(self._infos):
                self._infos = done
            return self._infos


def domains(given: Mapping[str, tuple[str, ...]], infos: Mapping[str, Info]) -> dict[str, tuple[str, ...]]:
    """The failure domains of members: as configured, or else as they say. One that is only told apart by its own name (`near=`)
    stands within what it says; one that has not said it yet stands alone.
    """
    found = {
        name: (*labelled(infos.get(name)), *domain) if domain in ((), (name,)) else domain for name, domain in given.items()
    }
    depth = max((len(domain) for domain in found.values()), default=0)
    told = any(info.labels for info in infos.values())
    return {name: domain or ((name,) * depth if told else ()) for name, domain in found.items()}


def labelled(info: Info | None) -> tuple[str, ...]:
    """The failure domains that a member says it stands in."""
    return () if info is None else tuple(value for _, value in info.labels)


def check_devices(infos: Mapping[str, Info], names: Iterable[str], url: str) -> None:
    """Raises InvalidArgument where two members are the same device: what is kept twice would be lost at once."""
    by_device: dict[str, str] = {}
    for name in names:
        info = infos.get(name)
        other = name if info is None else by_device.setdefault(info.identity, name)
        if other != name:
            raise InvalidArgument(f"{url}: {other} and {name} are the same device; name it once")
