"""The random generators that dataloaders, their samplers, datasets, collate functions and transforms have as attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from ckpt.state.stateful import Stateful, as_stateful, is_random_generator
from ckpt.support.user_warning import warn_user

_PARTS = ("sampler", "batch_sampler", "dataset", "generator", "collate_fn", "transform", "target_transform")
"""The attributes of a DataLoader, and of its parts, that may have random generators."""

_LISTS = ("datasets", "transforms")
"""The attributes whose elements are parts, as those of a ConcatDataset and of a Compose."""


def own_generator_states(loaders: Iterable[object]) -> dict[str, Any]:
    """Return the states of the generators that are attributes of dataloaders and of their parts."""
    return {
        key: copied_state(stateful.get())
        for name, part in parts_of_loaders(loaders)
        for key, stateful in generators_of_part(name, part)
    }


def set_own_generators(loaders: Iterable[object], states: dict[str, Any]) -> None:
    """Set the generators that are attributes of dataloaders and of their parts.

    states: what `own_generator_states` returned. Generators that it lacks stay unchanged.

    An object may make its generator at the first use. Such a generator can't be set before that, and a warning names it.
    """
    parts, existing = set[str](), set[str]()
    for name, part in parts_of_loaders(loaders):
        parts.add(name)
        for key, stateful in generators_of_part(name, part):
            existing.add(key)
            if key in states:
                stateful.set(copied_state(states[key]))
    if missing := sorted(key for key in states if key not in existing and key.rpartition(".")[0] in parts):
        warn_user(
            f"the random generators of the loaders ({', '.join(missing)}) are not made yet, so they do not continue from the "
            "saved step: make them in __init__, and not at their first use"
        )


def parts_of_loaders(loaders: Iterable[object]) -> Iterator[tuple[str, Any]]:
    """Yield the dataloaders and their parts, with their names: samplers, datasets, collate functions and transforms."""
    seen: set[int] = set()

    def below(name: str, value: object) -> Iterable[tuple[str, Any]]:
        if value is None or id(value) in seen or isinstance(value, (str, bytes, int, list, tuple, dict)):
            return
        seen.add(id(value))
        yield name, value
        for part in _PARTS:
            yield from below(f"{name}.{part}", getattr(value, part, None))
        for part in _LISTS:
            elements = getattr(value, part, None)
            for index, element in enumerate(elements if isinstance(elements, (list, tuple)) else ()):
                yield from below(f"{name}.{part}.{index}", element)
        if isinstance(value, (partial, WatchedCollate)):
            yield from below(f"{name}.func", value.func)
        if isinstance(value, MethodType):
            yield from below(f"{name}.self", value.__self__)

    for number, loader in enumerate(loaders):
        yield from below(str(number), loader)


class WatchedCollate:
    """A collate function that reports each batch that it has made."""

    def __init__(self, collate: Callable[[Any], Any], report: Callable[[], None]) -> None:
        self.func, self._report = collate, report

    def __call__(self, samples: Any) -> Any:
        batch = self.func(samples)
        self._report()
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "func":
            raise AttributeError(name)
        return getattr(self.func, name)


def generators_of_part(name: str, part: Any) -> Iterator[tuple[str, Stateful]]:
    """Yield the random generators that are attributes of an object, and a sampler that has a state or a seed of its own."""
    if is_random_generator(part) or ("sampler" in name.rpartition(".")[2] and hasattr(part, "load_state_dict")):
        if (stateful := as_stateful(part, name)) is not None:
            yield name, stateful
        return
    if "sampler" in name.rpartition(".")[2] and isinstance(getattr(part, "initial_seed", None), int):  # that of accelerate
        yield f"{name}.initial_seed", Stateful(lambda: part.initial_seed, lambda seed: setattr(part, "initial_seed", seed))
    for key, value in getattr(part, "__dict__", {}).items():
        if key not in _PARTS and is_random_generator(value) and (stateful := as_stateful(value, key)) is not None:
            yield f"{name}.{key}", stateful


def copied_state(value: Any) -> Any:
    """Return a state that later draws do not change: some generators return their own dicts and arrays."""
    if isinstance(value, dict):
        return {key: copied_state(each) for key, each in value.items()}
    if isinstance(value, list):
        return [copied_state(each) for each in value]
    if hasattr(value, "clone"):
        return value.clone()
    return value.copy() if hasattr(value, "copy") else value
