"""A checker of small models: it visits every state that can be reached, and reports the shortest way to one that is wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True)
class Exploration:
    """The result of `explore`."""

    states: int
    """The number of states that were visited."""
    error: str
    """What is wrong in the first wrong state; empty where no state is wrong."""
    steps: tuple[str, ...]
    """The steps that lead to it."""
    kinds: frozenset[str]
    """The kinds of all steps that were made, by which a test sees that the model does something."""

    def require_correct(self) -> None:
        """Fail with the steps to the first wrong state, if there is one."""
        assert not self.error, f"{self.error}, after these steps:\n  " + "\n  ".join(self.steps)


class Model(Generic[State]):
    """What `explore` needs of a model."""

    def initial(self) -> State:
        """Return the first state."""
        raise NotImplementedError

    def successors(self, state: State) -> Iterable[tuple[tuple[Any, ...], State]]:
        """Return what can happen next: the kind of each step with its details, and the state after it."""
        raise NotImplementedError

    def error(self, state: State) -> str:
        """Return which promise a state breaks; empty for none."""
        raise NotImplementedError


def explore(model: Model[State], max_states: int) -> Exploration:
    """Visit all states breadth-first, and end at the first wrong one.

    max_states: fails if there are more, because an exploration that is not complete proves nothing.
    """
    first = model.initial()
    origin: dict[State, tuple[State, tuple[Any, ...]] | None] = {first: None}
    waiting = deque([first])
    kinds: set[str] = set()
    while waiting:
        state = waiting.popleft()
        if error := model.error(state):
            return Exploration(len(origin), error, _steps_to(state, origin), frozenset(kinds))
        for step, after in model.successors(state):
            if after not in origin:
                origin[after] = state, step
                kinds.add(step[0])
                waiting.append(after)
        assert len(origin) <= max_states, f"the model has more than {max_states} states: make it smaller"
    return Exploration(len(origin), "", (), frozenset(kinds))


def _steps_to(state: State, origin: dict[State, tuple[State, tuple[Any, ...]] | None]) -> tuple[str, ...]:
    steps: list[str] = []
    while (last := origin[state]) is not None:
        state, step = last
        steps.append(" ".join(map(str, step)))
    return tuple(reversed(steps))
