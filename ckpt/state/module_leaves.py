"""The class ModuleLeaves, which finds the leaves of a state that are buffers or frozen parameters of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.state.torch_keys import ModuleEntries


class ModuleLeaves:
    """The names of the leaves that are buffers or frozen parameters.

    A leaf has the name of the first path to its array. That path may be outside of the module, as in
    `{"statistics": model.statistics, "model": model}`. An array that is a parameter and a buffer, or a frozen and a trained
    parameter, counts as the entry of the modules that comes first.
    """

    def __init__(self) -> None:
        self.buffers: set[str] = set()
        self.frozen: set[str] = set()
        self._set_by_path: dict[str, set[str]] = {}
        self._others: set[str] = set()  # the names of leaves that are other entries of a module
        self._depth = 0  # the number of open modules

    @contextmanager
    def inside(self, entries: ModuleEntries, path: str, is_module: bool) -> Iterator[None]:
        """Count the leaves that are added inside this context as entries of the object at `path`.

        An object that is no module counts only if it has buffers or frozen parameters.
        """
        counts = is_module or bool(entries.buffers or entries.frozen)
        for names, found in ((entries.buffers, self.buffers), (entries.frozen, self.frozen)):
            self._set_by_path.update((f"{path}.{name}" if path else name, found) for name in names)
        self._depth += counts
        try:
            yield
        finally:
            self._depth -= counts

    def add(self, name: str, path: str) -> None:
        """Note that the leaf `name` is at `path`, which may be one of several paths to it."""
        if not self._depth:
            return
        found = self._set_by_path.get(path)
        if found is None:
            self._others.add(name)
        elif name not in self._others:
            found.add(name)
