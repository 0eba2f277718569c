"""The class ModuleLeaves, which finds the leaves of a state that are buffers or frozen parameters of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.state.torch_keys import ModuleEntries


class ModuleLeaves:
    """The names of the leaves that are buffers or frozen parameters.

    A leaf has the name of the first path to its array. That path may be outside of the module, as in
    `{"statistics": model.statistics, "model": model}`. An array that is a trained parameter anywhere in the state is neither a
    buffer nor frozen. An array that is a frozen parameter and a buffer is a frozen parameter: ranks compare it.
    """

    def __init__(self) -> None:
        self.buffers: set[str] = set()
        self.frozen: set[str] = set()
        self._set_by_path: dict[str, set[str]] = {}
        self._trained: set[str] = set()  # the names of leaves that are trained parameters
        self._never_buffers: set[str] = set()  # the names of leaves that are parameters, or other entries of a module first
        self._depth = 0  # the number of open modules

    @contextmanager
    def inside(self, entries: ModuleEntries, path: str, is_module: bool) -> Iterator[None]:
        """Count the leaves that are added inside this context as entries of the object at `path`.

        An object that is not a module counts only if it has buffers or parameters.
        """
        counts = is_module or any(entries)
        for names, found in zip(entries, (self.buffers, self.frozen, self._trained), strict=True):
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
        if found is self._trained:
            self.add_parameter(name, is_trained=True)
        elif name in self._never_buffers:
            return
        elif found is self.buffers:
            self.buffers.add(name)
            self.frozen.discard(name)
        elif found is self.frozen:
            self.frozen.add(name)
            self.buffers.discard(name)
            self._never_buffers.add(name)
        elif name not in self.buffers:
            self._never_buffers.add(name)

    def add_parameter(self, name: str, is_trained: bool) -> None:
        """Note that the leaf `name` is a parameter, in a module or elsewhere.

        A parameter that is not trained may be a buffer: frameworks other than torch have statistics that are parameters.
        """
        if is_trained:
            self._trained.add(name)
            self._never_buffers.add(name)
            self.buffers.discard(name)
            self.frozen.discard(name)
        elif name not in self._trained and name not in self.buffers:
            self.frozen.add(name)
