"""Simulated processes of several threads: locks, conditions and tables of the product, for actors that take turns.

The process of an actor is the first word of its name: "job1" and "job1 copier" are threads of one process.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ckpt.block_io import replicated_store
from ckpt.repository import completeness, damage_registry, writer_lease
from ckpt.repository.attempt import SerialCounter
from ckpt.saving import lineage, previous_steps, session_registry
from ckpt.storage.base import fencing_probe
from ckpt.tiers import background_copier, manager, previous_memory
from helpers.interleaving import Actor, Fate, Interleaving, RandomScheduler, current_actor_name


def process_of(name: str) -> str:
    """Return the process of an actor, or of a late call of one."""
    found = re.match(r"\w*", name)
    return found[0] if found else ""


class PerProcess(MutableMapping[Any, Any]):
    """A dict of which each process has its own, such as one in a module of the product."""

    def __init__(self) -> None:
        self._by_process: dict[str, dict[Any, Any]] = {}

    @property
    def _own(self) -> dict[Any, Any]:
        return self._by_process.setdefault(process_of(current_actor_name()), {})

    def __getitem__(self, key: Any) -> Any:
        return self._own[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


class SteppedLock:
    """A lock whose waiting actor lets the others run."""

    def __init__(self, interleaving: Interleaving) -> None:
        self._interleaving, self._is_held = interleaving, False

    def __enter__(self) -> None:
        while self._is_held:
            self._interleaving.wait(5)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


class SteppedCondition:
    """A condition whose waiting actor lets the others run. Nobody takes a turn while another actor has its lock."""

    def __init__(self, interleaving: Interleaving) -> None:
        self._interleaving = interleaving

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Let others run for a while. The caller looks at what it waits for again, as after a spurious wake-up."""
        self._interleaving.wait(10)
        return True

    def notify_all(self) -> None:
        """Do nothing: those who wait look again by themselves."""


class SteppedThread:
    """A thread of the process that starts it, as another actor."""

    def __init__(self, interleaving: Interleaving, target: Callable[[], None], name: str) -> None:
        self._interleaving, self._target, self._name = interleaving, target, name

    def start(self) -> None:
        """Let the thread take turns from now on."""
        self._interleaving.start(f"{process_of(current_actor_name())} {self._name}", self._target)


class ProcessScheduler(RandomScheduler):
    """Kills whole processes, and loses replies.

    faults: the share of writes whose reply is lost, and the share of those that take effect later.
    """

    def __init__(self, rng: random.Random, sleeps: float, kills: float, faults: float) -> None:
        super().__init__(rng, sleeps, kills, late=0.1)
        self._faults = faults

    def next(self, living: Sequence[Actor], current: Actor | None, steps: list[str]) -> Actor | None:
        if len(steps) > 20_000:
            raise AssertionError("the run does not end")
        chosen = super().next(living, current, steps)
        if current is None or not current.is_killed:
            return chosen
        for actor in living:
            if process_of(actor.name) == process_of(current.name) and not actor.is_late_call:
                actor.is_killed = True
        left = [actor for actor in living if not actor.is_killed]
        return chosen if chosen in left else self._rng.choice(left) if left else None

    def fate(self, what: str) -> Fate:
        draw = self._rng.random()
        return Fate.LOST if draw < self._faults else Fate.LATE if draw < 2 * self._faults else Fate.DONE


@contextmanager
def separate_processes(interleaving: Interleaving) -> Iterator[None]:
    """Give each process its own tables of the modules, and replace threads, locks and clocks by steps."""
    locks = SimpleNamespace(Lock=lambda: SteppedLock(interleaving))
    threads = SimpleNamespace(
        Condition=lambda: SteppedCondition(interleaving),
        Thread=lambda target, **_: SteppedThread(interleaving, target, "copier"),
    )
    clock = SimpleNamespace(monotonic=lambda: len(interleaving.steps) / 20, sleep=lambda _: interleaving.wait(10))
    fencing_probe._probed_urls.clear()
    with ExitStack() as patches:
        for owner, name, new in (
            (session_registry, "_registry_lock", nullcontext()),
            (session_registry, "_sessions", PerProcess()),
            (replicated_store, "_bad_blocks", PerProcess()),
            (damage_registry, "_damaged", PerProcess()),
            (completeness, "_complete_steps", PerProcess()),
            (writer_lease, "threading", locks),
            (vars(SerialCounter)["highest_generation"], "lock", nullcontext()),  # before Python 3.12, one for all objects
            (previous_steps, "threading", locks),
            (lineage, "threading", locks),
            (background_copier, "threading", threads),
            (background_copier, "time", clock),
            (background_copier, "lower_thread_priority", lambda: None),
            (manager, "time", clock),
            (previous_memory, "time", clock),
        ):
            patches.enter_context(patch.object(owner, name, new, create=name == "lock"))
        yield
