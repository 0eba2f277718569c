"""Actors that take turns: a scheduler decides before each step which one runs next, which ones wait, and which are killed.

An actor is a function in a thread. It calls `Interleaving.step` before each thing that another actor could see. Only one actor
runs at a time, so equal decisions repeat a run exactly. An actor that is never woken is one whose process was killed.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto

_current = threading.local()


def current_actor_name() -> str:
    """Return the name of the actor that calls; "" in a thread of no actor, and in the check of a run."""
    actor: Actor | None = getattr(_current, "actor", None)
    return "" if actor is None else actor.name


class Killed(BaseException):
    """Ends the thread of an actor that is not woken any more. It can do nothing that others see."""


class Fate(Enum):
    """What happens to the call that a step announces."""

    DONE = auto()
    """It is made, and its reply arrives."""
    LOST = auto()
    """It takes effect, and its reply is lost."""
    LATE = auto()
    """Its caller gets an error, and it takes effect at some later time."""


class Steps:
    """Is called before each thing that another actor could see."""

    def step(self, what: str, *, can_fail: bool = False) -> Fate:
        """Return what happens to a call, after everything that happens before it.

        what: what is about to be done. can_fail: whether the reply may be lost.
        """
        raise NotImplementedError

    def call_later(self, what: str, call: Callable[[], object]) -> None:
        """Let a call take effect later. Only needed where `step` returns `LATE`."""
        raise NotImplementedError


class Actor:
    """One actor, as a scheduler sees it."""

    def __init__(self, name: str, run: Callable[[], None], interleaving: Interleaving, is_late_call: bool = False) -> None:
        self.name, self.is_late_call = name, is_late_call
        self.turn = threading.Semaphore(0)
        self.is_killed = self.has_begun = self.has_ended = self.was_left = False
        self.error: BaseException | None = None
        self.asleep_until = 0
        """The step of the run at which a `RandomScheduler` lets it continue."""
        self._run, self._interleaving = run, interleaving
        self.thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        _current.actor = self
        self.turn.acquire()
        try:
            if not self.is_killed:
                self.has_begun = True
                self._run()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.has_ended = True
        if not self.is_killed:
            self._interleaving.switch(self)


class Scheduler(ABC):
    """Decides how a run continues."""

    @abstractmethod
    def next(self, living: Sequence[Actor], current: Actor | None, steps: list[str]) -> Actor | None:
        """Return the actor that runs next, or None if all were killed.

        To kill `current`, set `is_killed`, note it in `steps`, and return another one.

        current: the one that ran last; it is not among the living if it has ended, and None before the first.
        """

    def fate(self, what: str) -> Fate:
        """Return what happens to a call that may fail. what: the call."""
        return Fate.DONE


class RandomScheduler(Scheduler):
    """Decides by a random generator.

    sleeps: the share of steps after which the actor stands still, for up to 200 steps or until no other one can run. kills: the
    share of steps after which it is killed. late: how often a late call is chosen, as a share of how often another actor is.
    """

    def __init__(self, rng: random.Random, sleeps: float = 0.05, kills: float = 0.0, late: float = 1.0) -> None:
        self._rng, self._sleeps, self._kills, self._late = rng, sleeps, kills, late

    def next(self, living: Sequence[Actor], current: Actor | None, steps: list[str]) -> Actor | None:
        now, draw = len(steps), self._rng.random()
        if current is not None and current in living:
            if draw < self._kills and len(living) > 1:
                current.is_killed = True
                living = [actor for actor in living if actor is not current]
                steps.append(f"{current.name} is killed")
            elif draw < self._kills + self._sleeps:
                current.asleep_until = now + self._rng.choice([3, 10, 30, 100, 200])
            elif draw < 0.7 and current.asleep_until <= now:
                return current
        awake = [a for a in living if a.asleep_until <= now] or living
        if self._late != 1.0:
            return self._rng.choices(awake, [self._late if actor.is_late_call else 1.0 for actor in awake])[0]
        return self._rng.choice(awake)


class Interleaving(Steps):
    """One run of several actors. check: called after each step; it raises AssertionError if a promise is broken."""

    def __init__(self, scheduler: Scheduler, check: Callable[[], None] = lambda: None) -> None:
        self._scheduler, self._check = scheduler, check
        self._actors: list[Actor] = []
        self._is_over = threading.Event()
        self._broken: BaseException | None = None
        self.steps: list[str] = []
        """What was done, in order."""

    def add(self, name: str, run: Callable[[], None]) -> None:
        """Add an actor; it begins when the scheduler chooses it first."""
        self._actors.append(Actor(name, run, self))

    def start(self, name: str, run: Callable[[], None], is_late_call: bool = False) -> None:
        """Add an actor while others run."""
        self._actors.append(actor := Actor(name, run, self, is_late_call))
        actor.thread.start()

    def is_alive(self, name: str) -> bool:
        """Return whether an actor has neither ended nor been killed."""
        return any(a.name == name and not a.has_ended and not a.is_killed for a in self._actors)

    def wait(self, steps: int) -> None:
        """Let the actor that calls stand still for a number of steps, or until no other one can run."""
        actor: Actor = _current.actor
        actor.asleep_until = len(self.steps) + steps
        self.step("waits")

    def call_later(self, what: str, call: Callable[[], object]) -> None:
        """Let a call take effect at a later step, which the scheduler decides. Its result and its error are ignored."""
        caller: Actor = _current.actor

        def run() -> None:
            self.steps.append(f"{caller.name}, late: {what}")
            call()

        self.start(f"{caller.name}, late", run, is_late_call=True)

    def run(self) -> dict[str, BaseException | None]:
        """Let the actors take turns until each has ended or was killed. Return the error of each, without late calls."""
        for actor in self._actors:
            actor.thread.start()
        try:
            self.switch(None)
            self._is_over.wait()
        finally:
            for actor in self._actors:
                if not actor.has_ended:
                    actor.is_killed = True
                    actor.turn.release()
            for actor in self._actors:
                actor.thread.join()
        if self._broken is not None:
            raise self._broken
        return {a.name: a.error for a in self._actors if not a.is_late_call}

    def switch(self, actor: Actor | None) -> None:
        """Check what the last step did, and give the turn to the next actor. Return when it is this one's turn again."""
        try:
            _current.actor = None  # the check calls the same stores, and its calls are not steps
            if actor is not None:
                self._check()
            living = [a for a in self._actors if not a.has_ended and not a.is_killed]
            chosen = self._scheduler.next(living, actor, self.steps) if living else None
        except BaseException as error:
            self._broken, chosen = error, None
        finally:
            _current.actor = actor
        if chosen is actor and actor is not None:
            return
        if chosen is None:
            self._is_over.set()
        else:
            chosen.turn.release()
        if actor is not None and not actor.has_ended:
            actor.turn.acquire()

    def step(self, what: str, *, can_fail: bool = False) -> Fate:
        """Wait for the next turn, in the thread of an actor; do nothing in another one. Return what happens to the call.

        what: what the actor is about to do. can_fail: whether its reply may be lost.
        """
        actor: Actor | None = getattr(_current, "actor", None)
        if actor is None:
            return Fate.DONE
        if not actor.is_killed:
            self.switch(actor)
        if actor.is_killed:
            raise Killed
        fate = self._scheduler.fate(what) if can_fail else Fate.DONE
        self.steps.append(f"{actor.name}: {what}" + ("" if fate is Fate.DONE else f" ({fate.name.lower()})"))
        return fate
