"""A store whose writes wait for a gate."""

import threading

from ckpt.storage.base.store import Writer
from ckpt.storage.local.directory import LocalStore

MIB = 1 << 20


class GatedStore(LocalStore):
    """A local directory whose pack writes wait for a gate, so that a test decides when a save continues."""

    def __init__(self, path):
        super().__init__(path)
        self.gate = threading.Event()

    def create(self, name, size_hint=0):
        return _GatedWriter(super().create(name, size_hint), self.gate)


class _GatedWriter(Writer):
    def __init__(self, inner, gate):
        self.inner, self.gate = inner, gate

    def append(self, data):
        assert self.gate.wait(600)
        return self.inner.append(data)

    def commit(self):
        return self.inner.commit()

    def abort(self):
        self.inner.abort()
