"""Actors that take turns: a seed decides after each step which one runs next, who stands still, and who is killed.

An actor is a function in a thread. It calls `Interleaving.step` before each thing that another actor could see. Only one actor
runs at a time, so a seed repeats a run exactly. An actor that is never woken is one whose process was killed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

_current = threading.local()


class Killed(BaseException):
    """Ends the thread of an actor that is not woken any more. It can do nothing that others see."""


class _Actor:
    def __init__(self, name: str, run: Callable[[], None], given_back: threading.Semaphore) -> None:
        self.name, self.turn, self.is_killed, self.has_ended = name, threading.Semaphore(0), False, False
        self.error: BaseException | None = None
        self.asleep_until = 0
        """The step of the run at which it may continue."""
        self._run, self._given_back = run, given_back
        self.thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        _current.actor = self
        self.turn.acquire()
        try:
            if not self.is_killed:
                self._run()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.has_ended = True
        self._given_back.release()


class Interleaving:
    """One run of several actors. check: called after each step; it raises AssertionError where a promise is broken.

    sleeps: the share of steps after which the actor stands still, for up to 200 steps or until no other one can run. kills: the
    share of steps after which it is killed.
    """

    def __init__(
        self, rng: random.Random, check: Callable[[], None] = lambda: None, sleeps: float = 0.05, kills: float = 0.0
    ) -> None:
        self._rng, self._check, self._sleeps, self._kills = rng, check, sleeps, kills
        self._actors: list[_Actor] = []
        self._given_back = threading.Semaphore(0)
        self.steps: list[str] = []
        """What was done, in order."""

    def add(self, name: str, run: Callable[[], None]) -> None:
        """Add an actor; it begins when `run` chooses it first."""
        self._actors.append(_Actor(name, run, self._given_back))

    def run(self) -> dict[str, BaseException | None]:
        """Let the actors take turns until each has ended or was killed. Return the error of each."""
        for actor in self._actors:
            actor.thread.start()
        current: _Actor | None = None
        try:
            while living := [a for a in self._actors if not a.has_ended and not a.is_killed]:
                current = self._next(living, current)
                current.turn.release()
                self._given_back.acquire()
                self._check()
        finally:
            for actor in self._actors:
                if not actor.has_ended:
                    actor.is_killed = True
                    actor.turn.release()
                    self._given_back.acquire()
        return {a.name: a.error for a in self._actors}

    def _next(self, living: list[_Actor], current: _Actor | None) -> _Actor:
        now, draw = len(self.steps), self._rng.random()
        if current is not None and current in living:
            if draw < self._kills and len(living) > 1:
                current.is_killed = True
                living.remove(current)
                self.steps.append(f"{current.name} is killed")
            elif draw < self._kills + self._sleeps:
                current.asleep_until = now + self._rng.choice([3, 10, 30, 100, 200])
            elif draw < 0.7 and current.asleep_until <= now:
                return current
        awake = [a for a in living if a.asleep_until <= now] or living
        return self._rng.choice(awake)

    def step(self, what: str) -> None:
        """Wait for the next turn, in the thread of an actor; do nothing in another one. what: what the actor is about to do."""
        actor: _Actor | None = getattr(_current, "actor", None)
        if actor is None:
            return
        if not actor.is_killed:
            self._given_back.release()
            actor.turn.acquire()
        if actor.is_killed:
            raise Killed
        self.steps.append(f"{actor.name}: {what}")
