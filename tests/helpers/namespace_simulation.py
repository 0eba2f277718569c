"""Clients, repairs and collections of one namespace, by the code of the product, in single steps that a seed orders.

Each call of a member is a step. A request or a reply may be lost. A call may arrive late: after any number of steps, when its
client has given up, has ended, or was killed. Any object counts as old enough to be deleted by a repair, and any tombstone as
old enough to be collected, so no promise can depend on a client that is fast enough.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.cluster.member_health import MemberHealth
from ckpt.aggregator.file_io import object_names, rebuild
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair
from ckpt.aggregator.maintenance.scrub import scrub_namespace
from ckpt.aggregator.records.tombstone_collection import collect_tombstones
from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.registers.sqlite import SqliteRegisters
from helpers.interleaving import Interleaving, Killed, RandomScheduler
from helpers.linearizability import Call
from helpers.namespace_calls import make_call
from helpers.nodes import directories

PATHS = ("a", "b")
SIZES = (20, 40_000, 40_000)
"""Bytes of a file: the smaller ones are stored in the record, the others as objects."""
OLD = -3600.0
"""A grace period after which each object is too old for a write that still runs."""


def described(name: str, call: Callable[[], Any]) -> str:
    """Return which call of which member this is, for the list of steps."""
    while isinstance(call, partial):
        call = call.func
    return f"calls {name}: {getattr(call, '__qualname__', '').replace('.<locals>', '')}"


class SteppedFanOut(FanOut):
    """Calls members one after the other in the thread of the caller, each call a step."""

    def __init__(self, simulation: NamespaceSimulation) -> None:
        super().__init__(MemberHealth(first_pause_seconds=0.0, max_pause_seconds=0.0))
        self._simulation = simulation

    def submit(self, name: str, call: Callable[[], Any], hides_errors: bool = False) -> Future[Any]:
        made: Future[Any] = Future()
        try:
            made.set_result(self._simulation.call(name, call))
        except StoreError as error:
            made.set_exception(error)
        return made

    def _call_each(
        self, calls: Mapping[str, Callable[[], Any]], timeout_seconds: float, mark_late: bool, is_acceptable: Callable[[], bool]
    ) -> Iterator[tuple[str, Any]]:
        left = self._simulation.shuffled(calls)
        try:
            while left:
                name = left.pop()
                try:
                    yield name, self._simulation.call(name, calls[name])
                except StoreError as error:
                    yield name, error
        except Killed:
            left.clear()
            raise
        finally:  # the caller has enough answers, and the other calls run on without it
            for name in left:
                self._simulation.interleaving.call_later(described(name, calls[name]), calls[name])


class NamespaceSimulation:
    """One run of clients, repairs and collections on the members in a folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._draw = random.Random(seed)
        self._member_count = self._draw.choice([3, 3, 4])
        self._faults = self._draw.choice([0.0, 0.02, 0.07])
        """The share of calls whose request is lost. As many replies are lost, and as many calls arrive late."""
        sleeps, kills = self._draw.choice([0.02, 0.1]), self._draw.choice([0.0, 0.003])
        self.interleaving = Interleaving(RandomScheduler(self._draw, sleeps, kills, late=0.05))
        self.history: dict[str, list[Call]] = {path: [] for path in PATHS}
        self._opened: list[Namespace] = []
        self.collected = 0
        """The number of tombstones that were collected."""
        self._clock = itertools.count()

    # --- members ---------------------------------------------------------------------------------------------------

    def shuffled(self, names: Iterable[str]) -> list[str]:
        """Return names in an order that the seed decides."""
        found = sorted(names)
        self._draw.shuffle(found)
        return found

    def call(self, name: str, call: Callable[[], Any]) -> Any:
        """Call a member, and return its answer. Raises Unavailable if the request or the reply is lost, or late."""
        self.interleaving.step(described(name, call))
        draw = self._draw.random()
        if draw < self._faults:
            raise Unavailable(f"the request to {name} was lost")
        if draw < 2 * self._faults:
            self.interleaving.call_later(described(name, call), call)
            raise Unavailable(f"{name} has not answered in time")
        answer = call()
        if draw < 3 * self._faults:
            raise Unavailable(f"the reply of {name} was lost")
        return answer

    def open(self, is_stepped: bool = True) -> Namespace:
        """Return a client of the namespace."""
        config = directories(self._folder, self._member_count, redundancy="2x", deadline_seconds=600.0)
        if not is_stepped:
            return Namespace(config)
        with patch("ckpt.aggregator.records.current_members.FanOut", lambda _: SteppedFanOut(self)):
            namespace = Namespace(config)
        namespace.member_io.read_fan_out = namespace.fan_out
        self._opened.append(namespace)
        return namespace

    # --- actors ----------------------------------------------------------------------------------------------------

    def add(self, name: str, work: Callable[[Namespace], None]) -> None:
        """Add an actor with a client of its own. A call that fails because members do not answer ends its work."""

        def run() -> None:
            with suppress(StoreError):
                work(self.open())

        self.interleaving.add(name, run)

    def add_client(self, name: str, calls: int, deletes: int = 1) -> None:
        """Add a client that makes a number of calls at random, and records them.

        deletes: how many of about six calls delete a file.
        """
        draw = random.Random(self._draw.random())

        def work(namespace: Namespace) -> None:
            for number in range(calls):
                kind = draw.choice(["put", "put", "put_new", "get", "get", *["delete"] * deletes])
                self._record(namespace, name, kind, draw.choice(PATHS), f"{name}.{number}", draw.choice(SIZES))

        self.add(name, work)

    def _record(self, namespace: Namespace, client: str, kind: Any, path: str, value: str, nbytes: int) -> None:
        began, ended, result = next(self._clock), math.inf, None
        written = value if kind in ("put", "put_new") else None
        try:
            result = make_call(namespace, kind, path, value, nbytes)
            ended = next(self._clock)
        except StoreError:  # the call may take place later, or never
            pass
        finally:
            self.history[path].append(Call(client, kind, began, ended, written, result))

    def add_repair(self, name: str, rounds: int) -> None:
        """Add an actor that repairs the namespace. It deletes each object that no record names, however young."""

        def work(namespace: Namespace) -> None:
            for _ in range(rounds):
                with suppress(StoreError):
                    repair.repair_namespace(namespace, scrub_namespace(namespace, grace_seconds=OLD))

        self.add(name, work)

    def add_collection(self, name: str, rounds: int) -> None:
        """Add an actor that collects tombstones of any age."""

        def work(namespace: Namespace) -> None:
            for _ in range(rounds):
                with suppress(StoreError):
                    self.collected += collect_tombstones(namespace, OLD)

        self.add(name, work)

    # --- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Create the namespace, let the actors take turns until all have ended, and read each file at the end."""
        with self._decided_by_the_seed():
            self.open(is_stepped=False).put("first", b"x")
            try:
                errors = self.interleaving.run()
            finally:
                for namespace in self._opened:
                    namespace.close()
            assert not any(errors.values()), errors
            last = self.open(is_stepped=False)
            for path in PATHS:
                self._record(last, "last", "get", path, "", 0)
                assert not math.isinf(self.history[path][-1].ended), f"{path} can't be read at the end"
            last.close()

    @contextmanager
    def _decided_by_the_seed(self) -> Iterator[None]:
        """Let the seed decide names and waits, which are random elsewhere, and leave out what only slow disks need."""
        names, clock = random.Random(self._draw.random()), itertools.count(1_800_000_000)
        connect = SqliteRegisters._connect

        def connect_without_fsync(registers: SqliteRegisters) -> Any:
            db = connect(registers)
            db.execute("PRAGMA synchronous = OFF")
            return db

        def in_order(call: Callable[[Any], object], items: Iterable[Any], *_: Any) -> None:
            for item in items:
                call(item)

        with ExitStack() as patches:
            for target, new in (
                ("secrets.token_hex", lambda nbytes=32: names.randbytes(nbytes).hex()),
                ("time.sleep", lambda seconds: self.interleaving.step("waits")),
                ("random.SystemRandom.uniform", lambda _, low, high: low),
            ):
                patches.enter_context(patch(target, new))
            patches.enter_context(patch.object(object_names, "time", SimpleNamespace(time=lambda: next(clock))))
            patches.enter_context(patch.object(SqliteRegisters, "_connect", connect_without_fsync))
            for module in (repair, rebuild):
                patches.enter_context(patch.object(module, "run_in_order", in_order))
            patches.enter_context(patch.object(Namespace, "_start_collection_if_needed", lambda *_: None))
            yield
